"""AutoencoderKLWan: a VAE whose convolutions are causal in time."""

from mmtrain.families.family import Family, Vae

FAMILY = Family(
    name="autoencoder_kl_wan",
    vaes={
        "autoencoder_kl_wan": Vae(
            defaults={
                "base_dim": 96,
                "z_dim": 16,
                "dim_mult": (1, 2, 4, 4),
                "num_res_blocks": 2,
                "temperal_downsample": (False, True, True),
                "dropout": 0.0,
                "latents_mean": (
                    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
                    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
                ),
                "latents_std": (
                    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
                    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
                ),
                "is_residual": False,
                "in_channels": 3,
                "out_channels": 3,
            },
            optional={
                "decoder_base_dim": 96,
                "attn_scales": None,
                "patch_size": None,
                "scale_factor_temporal": 4,
                "scale_factor_spatial": 8,
            },
            parents=("AutoencoderKLWan",),
            narrow=lambda values: {"base_dim": 8, "dim_mult": [1] * len(values["dim_mult"]), "num_res_blocks": 1},
            dropout=("dropout",),
        )
    },
)
