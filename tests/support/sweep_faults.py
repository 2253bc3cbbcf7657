"""Stands in for `jaxunet.sweep.measure` in tests of the runner, without JAX.

The batch size of a point chooses what it does.
"""

import json
import os
import signal
import subprocess
import sys
import time

task = json.loads(sys.argv[1])
batch = task['config']['data']['batch_size']
if batch == 17:
    sys.exit(1)
print('starting', file=sys.stderr, flush=True)
match batch:
    case 11:
        os.abort()
    case 12:
        print('ValueError: went wrong', file=sys.stderr)
        sys.exit(3)
    case 13:
        os.kill(os.getpid(), signal.SIGKILL)
    case 14:  # hangs, together with a child that would outlive it
        worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
        with open(os.environ['SWEEP_WORKER'], 'w') as file:
            file.write(str(worker.pid))
        time.sleep(60)
    case 15:
        sys.exit(0)  # prints nothing
with open(os.environ['SWEEP_CALLS'], 'a') as file:
    file.write(f'{batch}\n')
print('chatter of a library')
step_ms = 2.0 if task['jit'] else 40.0
row = {
    'status': 'ok',
    'lower_s': 0.5,
    'compile_s': 4.0,
    'compile_cached': False,
    'steps': task['steps'],
    'warmup': task['warmup'],
    'step_ms': {'median': step_ms, 'quartiles': [step_ms, step_ms]},
    'images_per_s': batch / step_ms * 1e3,
    'images_per_s_range': [batch / step_ms * 1e3] * 2,
    'peak_bytes': batch * 2**30,
    'peak_source': 'device',
    'loss': 1.0,
}
print(json.dumps(row))
