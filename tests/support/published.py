"""Settings of published models as their own programs state them: flags in READMEs, and configs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

# Defaults of `create_model_and_diffusion` (script_util.py) that a README leaves out, and its
# channel_mult by image_size.
GUIDED = {
    'num_heads': '4',
    'num_heads_upsample': '-1',
    'num_head_channels': '-1',
    'attention_resolutions': '16,8',
    'resblock_updown': 'False',
    'use_scale_shift_norm': 'True',
    'use_new_attention_order': 'False',
    'class_cond': 'False',
    'learn_sigma': 'False',
    'diffusion_steps': '1000',
    'noise_schedule': 'linear',
    'rescale_timesteps': 'False',
    'rescale_learned_sigmas': 'False',
    'use_kl': 'False',
    'predict_xstart': 'False',
    'dropout': '0.0',
}
IMPROVED = GUIDED | {'rescale_timesteps': 'True', 'rescale_learned_sigmas': 'True'}
CHANNEL_MULT = {
    '32': '1,2,2,2',
    '64': '1,2,3,4',
    '128': '1,1,2,3,4',
    '256': '1,1,2,2,4,4',
}
ADM256 = (
    '--attention_resolutions 32,16,8 --class_cond False --diffusion_steps 1000 --image_size 256 '
    '--learn_sigma True --noise_schedule linear --num_channels 256 --num_head_channels 64 '
    '--num_res_blocks 2 --resblock_updown True --use_scale_shift_norm True'
)
LSUN = (
    '--image_size 256 --num_channels 128 --num_res_blocks 2 --num_heads 1 --learn_sigma True '
    '--use_scale_shift_norm False --attention_resolutions 16 --diffusion_steps 1000 '
    '--noise_schedule linear --rescale_learned_sigmas False --rescale_timesteps False'
)
IDDPM64 = (
    '--image_size 64 --num_channels 128 --num_res_blocks 3 --learn_sigma True '
    '--diffusion_steps 4000 --noise_schedule cosine'
)
CIFAR = IDDPM64.replace('--image_size 64', '--image_size 32') + ' --dropout 0.3'
# The README files of openai/guided-diffusion (22e0df8) and improved-diffusion (1bc7bbb).
README = {
    'adm_imagenet64': '--attention_resolutions 32,16,8 --class_cond True --diffusion_steps 1000 '
    '--dropout 0.1 --image_size 64 --learn_sigma True --noise_schedule cosine --num_channels 192 '
    '--num_head_channels 64 --num_res_blocks 3 --resblock_updown True '
    '--use_new_attention_order True --use_scale_shift_norm True',
    'adm_imagenet128': '--attention_resolutions 32,16,8 --class_cond True --diffusion_steps 1000 '
    '--image_size 128 --learn_sigma True --noise_schedule linear --num_channels 256 --num_heads 4 '
    '--num_res_blocks 2 --resblock_updown True --use_scale_shift_norm True',
    'adm_imagenet256': ADM256 + ' --class_cond True',
    'adm_imagenet256_uncond': ADM256,
    'adm_imagenet512': ADM256 + ' --class_cond True --image_size 512',
    'adm_upsample_64_256': '--attention_resolutions 32,16,8 --class_cond True '
    '--diffusion_steps 1000 --large_size 256 --small_size 64 --learn_sigma True '
    '--noise_schedule linear --num_channels 192 --num_heads 4 --num_res_blocks 2 '
    '--resblock_updown True --use_scale_shift_norm True',
    'adm_upsample_128_512': '--attention_resolutions 32,16 --class_cond True '
    '--diffusion_steps 1000 --large_size 512 --small_size 128 --learn_sigma True '
    '--noise_schedule linear --num_channels 192 --num_head_channels 64 --num_res_blocks 2 '
    '--resblock_updown True --use_scale_shift_norm True',
    'adm_lsun_bedroom': ADM256 + ' --dropout 0.1',
    'adm_lsun_cat': ADM256 + ' --dropout 0.1',
    'adm_lsun_horse': ADM256 + ' --dropout 0.1',
    'adm_lsun_horse_nodropout': ADM256,
    'iddpm_imagenet64_cosine': IDDPM64,
    'iddpm_imagenet64_vlb': IDDPM64 + ' --use_kl True',
    'iddpm_imagenet64_cond': IDDPM64
    + ' --num_channels 192 --class_cond True --rescale_learned_sigmas False '
    '--rescale_timesteps False',
    'iddpm_cifar10_cosine': CIFAR,
    'iddpm_cifar10_vlb': CIFAR + ' --use_kl True',
    'iddpm_lsun_bedroom': LSUN,
    # The sizes are the defaults of its super_res_sample.py.
    'iddpm_upsample_64_256': '--large_size 256 --small_size 64 --num_channels 192 '
    '--num_res_blocks 2 --learn_sigma True --class_cond True --diffusion_steps 4000 '
    '--noise_schedule linear --rescale_learned_sigmas False --rescale_timesteps False',
}
# configs/ of tqch/ddpm-torch (b60eb8d): hid_channels, ch_multipliers, levels of apply_attn,
# drop_rate, and the image size of the set.
DDPM_TORCH = {
    'ddpm_torch_cifar10': (128, (1, 2, 2, 2), (1,), 0.1, 32),
    'ddpm_torch_celeba': (128, (1, 2, 2, 2), (2,), 0.0, 64),
    'ddpm_torch_celebahq': (128, (1, 1, 2, 2, 4, 4), (4,), 0.0, 256),
}
# ddpm-torch's configs/cifar10.json, and what its train.py adds.
CIFAR10_RUN = {
    'dataset': 'cifar10',
    'diffusion': {
        'timesteps': 1000,
        'beta_start': 0.0001,
        'beta_end': 0.02,
        'beta_schedule': 'linear',
        'model_mean_type': 'eps',
        'model_var_type': 'fixed-large',
        'loss_type': 'mse',
    },
    'model': {
        'in_channels': 3,
        'hid_channels': 128,
        'ch_multipliers': [1, 2, 2, 2],
        'num_res_blocks': 2,
        'apply_attn': [False, True, False, False],
        'drop_rate': 0.1,
    },
    'train': {
        'lr': 2e-4,
        'batch_size': 128,
        'grad_norm': 1.0,
        'epochs': 2040,
        'warmup': 5000,
        'use_ema': True,
        'ema_decay': 0.9999,
    },
}
CIFAR10_DEFAULTS = {'beta1': 0.9, 'beta2': 0.999, 'num_accum': 1}

# The flags of the scripts of openai/guided-diffusion (22e0df8) and improved-diffusion (1bc7bbb).
FLAGS = (
    'anneal_lr attention_resolutions base_samples batch_size channel_mult class_cond '
    'classifier_attention_resolutions classifier_depth classifier_path classifier_pool '
    'classifier_resblock_updown classifier_scale classifier_use_fp16 '
    'classifier_use_scale_shift_norm classifier_width clip_denoised data_dir diffusion_steps '
    'dropout ema_rate eval_interval fp16_scale_growth image_size iterations large_size learn_sigma '
    'log_interval lr lr_anneal_steps microbatch model_path noise_schedule noised num_channels '
    'num_head_channels num_heads num_heads_upsample num_res_blocks num_samples predict_xstart '
    'rescale_learned_sigmas rescale_timesteps resblock_updown resume_checkpoint save_interval '
    'schedule_sampler sigma_small small_size timestep_respacing use_checkpoint use_ddim use_fp16 '
    'use_kl use_new_attention_order use_scale_shift_norm val_data_dir weight_decay'
)


def parsed(text: str) -> dict[str, str]:
    """Returns the values of `--name value` flags by name."""
    words = text.split()
    return dict(zip((name.removeprefix('--') for name in words[::2]), words[1::2], strict=True))


def digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns a digest of the names and shapes of a state dict, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()
