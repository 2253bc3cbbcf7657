"""The readers of XLA's messages and programs in `tools/gpu/compile.py`."""

import pathlib
import runpy

COMPILE = runpy.run_path(str(pathlib.Path(__file__).parents[2] / 'tools/gpu/compile.py'))

MESSAGES = """
I1125 15:15:32 9 hlo_pass_pipeline.cc:206] HLO pass: fusion time: 2.22 s (2223872 us) (cumu
I1125 15:15:32 9 hlo_pass_pipeline.cc:211]   HLO pass copy-insertion
I1125 15:15:32 9 hlo_pass_pipeline.cc:206] HLO pass: copy-insertion time: 158 ms (157757 us) (cumu
I1125 15:15:32 9 hlo_pass_pipeline.cc:206] HLO pass: fusion time: 1 s (1000000 us) (cumu
"""
PROGRAM = """HloModule jit_whole, is_scheduled=true

%fused_computation (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %copy.9 = f32[8]{0} copy(%param_0)
}

%gemm_fusion_dot_computation (parameter_0: f32[8,8]) -> f32[8,8] {
  ROOT %fusion.9 = f32[8,8]{1,0} fusion(%parameter_0), kind=kLoop, calls=%fused_computation
}

%body (state: (f32[8])) -> (f32[8]) {
  %call.1 = (f32[8]{0}, /*index=1*/f32[8]{0}) custom-call(%a), custom_call_target="jaxunet_adamw"
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused_computation
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %copy.1 = f32[8]{0} copy(%p)
  %fusion.2 = (f32[8]{0}, f32[]) fusion(%copy.1), kind=kInput, calls=%fused_computation
  ROOT %r = f32[8]{0} bitcast(%copy.1)
}
"""


def test_the_slowest_passes_with_all_their_calls():
    found = COMPILE['slowest'](MESSAGES.splitlines(), 5)
    assert found == [('fusion', 3.223872), ('copy-insertion', 0.157757)]
    assert COMPILE['slowest'](MESSAGES.splitlines(), 1) == found[:1]


def test_launches_are_those_outside_of_fusions():
    assert COMPILE['launches'](PROGRAM) == {'jaxunet_adamw': 1, 'fusion': 2, 'copy': 1}
