"""Published models by name, each with the config that its README's flags describe.

Sources: the README files of openai/guided-diffusion (22e0df8), openai/improved-diffusion (1bc7bbb),
tqch/ddpm-torch (b60eb8d) with its `configs/`, and NVlabs/edm (008a4e5) with its `train.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxunet.config import Config, resolve, to_dict
from jaxunet.weights import ddpm_torch, edm
from jaxunet.weights.guided_diffusion import CHANNEL_MULT, SUPER_RESOLUTION_MULT

IDDPM_HEADS = {'num_heads': 4, 'num_head_channels': 0}
ADM_MODEL = {
    'base_channels': 256,
    'num_res_blocks': 2,
    'attention_resolutions': (32, 16, 8),
    'num_head_channels': 64,
    'resblock_updown': True,
    'scale_shift_norm': True,
}
IDDPM_MODEL = {
    'base_channels': 128,
    'num_res_blocks': 3,
    'attention_resolutions': (16, 8),
    'conv_resample': True,
    'scale_shift_norm': True,
    **IDDPM_HEADS,
}
DDPM_MODEL = ddpm_torch.FIXED | {
    'base_channels': 128,
    'num_res_blocks': 2,
    'conv_resample': True,
    'init': 'ddpm',
}
DDPMPP_MODEL = (
    edm.FIXED
    | edm.FIXED_OF[edm.SONG]
    | {
        'base_channels': 128,
        'conv_in_channels': 128,
        'channel_mult': (2, 2, 2),
        'num_res_blocks': 4,
        'attention_resolutions': (16,),
        'time_embedding': 'ddpm',
    }
)
NCSNPP_MODEL = DDPMPP_MODEL | {
    'time_embedding': 'fourier',
    'channel_mult_noise': 2,
    'encoder_type': 'residual',
    'resample_filter': (1, 3, 3, 1),
}
IMAGENET = {'num_classes': 1000}
EDM = {'objective': 'edm', 'edm_time_scale': 1.0}
ADM_LINEAR = {'learn_sigma': True}
IDDPM_COSINE = {'learn_sigma': True, 'steps': 4000, 'schedule': 'cosine', 'rescale_timesteps': True}


class Preset(NamedTuple):
    """A published model.

    Fields:
      files: names of its weight files.
      size: side of its images, in pixels.
      model, diffusion: changed fields of these sections.
      new_attention_order: guided-diffusion's `use_new_attention_order`; None if the model's program
        has only one order.
      augment: the field of `data`.
    """

    files: tuple[str, ...]
    size: int
    model: dict[str, Any]
    diffusion: dict[str, Any]
    new_attention_order: bool | None = False
    augment: str = 'none'

    def config(self) -> Config:
        """Returns the config of the model."""
        common = {
            'image_channels': 3,
            'channel_mult': CHANNEL_MULT[self.size],
            'num_classes': 0,
            'label_dropout': 0.0,
        }
        return resolve(
            to_dict(
                Config().replace(
                    model=common | self.model,
                    diffusion=self.diffusion,
                    data={'path': '', 'image_size': (self.size,), 'augment': self.augment},
                )
            )
        )


def _lsun(name: str, dropout: float = 0.1) -> Preset:
    return Preset((f'lsun_{name}.pt',), 256, ADM_MODEL | {'dropout': dropout}, ADM_LINEAR)


def _edm(data: str, size: int, arch: str, model: dict[str, Any]) -> Preset:
    """Returns a network of NVlabs/edm that was trained with its augmentation."""
    network = DDPMPP_MODEL if arch == 'vp' else NCSNPP_MODEL
    file = f'edm-{data}-{arch}.pkl'
    return Preset((file,), size, network | model, EDM, new_attention_order=None, augment='edm')


FACES = {'channel_mult': (1, 2, 2, 2)}
PRESETS = {
    # guided-diffusion
    'adm_imagenet64': Preset(
        ('64x64_diffusion.pt',),
        64,
        ADM_MODEL | IMAGENET | {'base_channels': 192, 'num_res_blocks': 3, 'dropout': 0.1},
        {'learn_sigma': True, 'schedule': 'cosine'},
        new_attention_order=True,
    ),
    'adm_imagenet128': Preset(
        ('128x128_diffusion.pt',), 128, ADM_MODEL | IMAGENET | IDDPM_HEADS, ADM_LINEAR
    ),
    'adm_imagenet256': Preset(('256x256_diffusion.pt',), 256, ADM_MODEL | IMAGENET, ADM_LINEAR),
    'adm_imagenet256_uncond': Preset(('256x256_diffusion_uncond.pt',), 256, ADM_MODEL, ADM_LINEAR),
    'adm_imagenet512': Preset(('512x512_diffusion.pt',), 512, ADM_MODEL | IMAGENET, ADM_LINEAR),
    'adm_upsample_64_256': Preset(
        ('64_256_upsampler.pt',),
        256,
        ADM_MODEL | IMAGENET | IDDPM_HEADS | {'base_channels': 192, 'low_res_size': (64,)},
        ADM_LINEAR,
    ),
    'adm_upsample_128_512': Preset(
        ('128_512_upsampler.pt',),
        512,
        ADM_MODEL
        | IMAGENET
        | {
            'base_channels': 192,
            'channel_mult': SUPER_RESOLUTION_MULT[512],
            'attention_resolutions': (32, 16),
            'low_res_size': (128,),
        },
        ADM_LINEAR,
    ),
    'adm_lsun_bedroom': _lsun('bedroom'),
    'adm_lsun_cat': _lsun('cat'),
    'adm_lsun_horse': _lsun('horse'),
    'adm_lsun_horse_nodropout': _lsun('horse_nodropout', 0.0),
    # improved-diffusion
    'iddpm_imagenet64_cosine': Preset(
        ('imagenet64_uncond_100M_1500K.pt',), 64, IDDPM_MODEL, IDDPM_COSINE
    ),
    'iddpm_imagenet64_vlb': Preset(
        ('imagenet64_uncond_vlb_100M_1500K.pt',), 64, IDDPM_MODEL, IDDPM_COSINE | {'kl_loss': True}
    ),
    'iddpm_imagenet64_cond': Preset(
        ('imagenet64_cond_270M_250K.pt',),
        64,
        IDDPM_MODEL | IMAGENET | {'base_channels': 192},
        # The variational bound has its full weight (rescale_learned_sigmas False).
        IDDPM_COSINE | {'rescale_timesteps': False, 'vlb_weight': 1 / 4000},
    ),
    'iddpm_cifar10_cosine': Preset(
        ('cifar10_uncond_50M_500K.pt',), 32, IDDPM_MODEL | {'dropout': 0.3}, IDDPM_COSINE
    ),
    'iddpm_cifar10_vlb': Preset(
        ('cifar10_uncond_vlb_50M_500K.pt',),
        32,
        IDDPM_MODEL | {'dropout': 0.3},
        IDDPM_COSINE | {'kl_loss': True},
    ),
    'iddpm_lsun_bedroom': Preset(
        ('lsun_uncond_100M_1200K_bs128.pt', 'lsun_uncond_100M_2400K_bs64.pt'),
        256,
        IDDPM_MODEL
        | {
            'num_res_blocks': 2,
            'num_heads': 1,
            'scale_shift_norm': False,
            'attention_resolutions': (16,),
        },
        {'learn_sigma': True},
    ),
    'iddpm_upsample_64_256': Preset(
        ('upsample_cond_500K.pt',),
        256,
        IDDPM_MODEL | IMAGENET | {'base_channels': 192, 'num_res_blocks': 2, 'low_res_size': (64,)},
        {'learn_sigma': True, 'steps': 4000, 'vlb_weight': 1 / 4000},
    ),
    # ddpm-torch
    'ddpm_torch_cifar10': Preset(
        ('cifar10_2040.pt',),
        32,
        DDPM_MODEL | {'attention_resolutions': (16,), 'dropout': 0.1},
        {},
        new_attention_order=None,
    ),
    'ddpm_torch_celeba': Preset(
        ('celeba_600.pt',),
        64,
        DDPM_MODEL | {'channel_mult': (1, 2, 2, 2), 'attention_resolutions': (16,)},
        {},
        new_attention_order=None,
    ),
    'ddpm_torch_celebahq': Preset(
        ('celebahq_1200.pt',),
        256,
        DDPM_MODEL | {'attention_resolutions': (16,)},
        {},
        new_attention_order=None,
    ),
    # NVlabs/edm: DDPM++ (vp), NCSN++ (ve) and ADM's network
    **{
        f'edm_{name}_{arch}': _edm(data, size, arch, model)
        for arch in ('vp', 've')
        for name, data, size, model in (
            ('cifar10', 'cifar10-32x32-uncond', 32, {'dropout': 0.13}),
            ('cifar10_cond', 'cifar10-32x32-cond', 32, {'dropout': 0.13, 'num_classes': 10}),
            ('ffhq64', 'ffhq-64x64-uncond', 64, FACES | {'dropout': 0.05}),
            ('afhqv2_64', 'afhqv2-64x64-uncond', 64, FACES | {'dropout': 0.25}),
        )
    },
    'edm_imagenet64': Preset(
        ('edm-imagenet-64x64-cond-adm.pkl',),
        64,
        edm.FIXED
        | edm.FIXED_OF[edm.DHARIWAL]
        | IMAGENET
        | {
            'base_channels': 192,
            'num_res_blocks': 3,
            'attention_resolutions': (32, 16, 8),
            'dropout': 0.1,
        },
        EDM,
        new_attention_order=None,
    ),
}


def preset_of(file: str) -> str | None:
    """Returns the name of the preset whose weight file has this name; None if there is none."""
    return next((name for name, preset in PRESETS.items() if file in preset.files), None)
