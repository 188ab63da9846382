"""InsightFace's names of networks, and the settings that build the same network here.

This is the only table of these names: importing configs and exporting to InsightFace both use it. A test compares it with
`backbones.BACKBONES`. It does not import that table, because `megaclass import-config` need not load torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A network of InsightFace's get_model() as settings of [backbone]."""

    name: str
    drop_path: float = 0.0
    mask_patches: float = 0.0
    checkpoint_activations: bool = False


# vit_*_mask_005 say 5 %, but InsightFace's code masks 10 % wherever the ratio is not 0.
NETWORKS = {
    **{f"r{depth}": Network(f"iresnet{depth}") for depth in (18, 34, 50, 100, 200)},
    "r2060": Network("iresnet2060", checkpoint_activations=True),
    "mbf": Network("mbf"),
    "mbf_large": Network("mbf_large"),
    "vit_t": Network("vit_t", 0.1, 0.1),
    "vit_t_dp005_mask0": Network("vit_t", 0.05),
    "vit_s": Network("vit_s", 0.1, 0.1),
    "vit_s_dp005_mask_0": Network("vit_s", 0.05),
    "vit_b": Network("vit_b", 0.1, 0.1, checkpoint_activations=True),
    "vit_b_dp005_mask_005": Network("vit_b", 0.05, 0.1, checkpoint_activations=True),
    "vit_l_dp005_mask_005": Network("vit_l", 0.05, 0.1, checkpoint_activations=True),
    "vit_h": Network("vit_h", 0.1, checkpoint_activations=True),
}

INSIGHTFACE_NAMES: dict[str, str] = {}
"""InsightFace's name of each of our backbones; weights do not depend on the variant, so the first name counts."""
for _name, _network in NETWORKS.items():
    INSIGHTFACE_NAMES.setdefault(_network.name, _name)
