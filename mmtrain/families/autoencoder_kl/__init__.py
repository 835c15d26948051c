"""AutoencoderKL: a VAE that encodes each frame as an image."""

from mmtrain.families.family import Family, Vae

FAMILY = Family(
    name="autoencoder_kl",
    vaes={
        "autoencoder_kl": Vae(
            defaults={
                "in_channels": 3,
                "out_channels": 3,
                "down_block_types": ("DownEncoderBlock2D",),
                "up_block_types": ("UpDecoderBlock2D",),
                "block_out_channels": (64,),
                "layers_per_block": 1,
                "act_fn": "silu",
                "latent_channels": 4,
                "norm_num_groups": 32,
                "sample_size": 32,
                "scaling_factor": 0.18215,
                "force_upcast": True,
                "use_quant_conv": True,
                "use_post_quant_conv": True,
                "mid_block_add_attention": True,
            },
            optional=dict.fromkeys(("shift_factor", "latents_mean", "latents_std")),
            parents=("AutoencoderKL",),
            narrow=lambda values: {
                "block_out_channels": [8] * len(values["block_out_channels"]),
                "norm_num_groups": 4,
                "layers_per_block": 1,
            },
        )
    },
)
