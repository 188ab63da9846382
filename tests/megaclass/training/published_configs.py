"""The facts of InsightFace's published `arcface_torch/configs/*.py`: what each sets, and a file of ours that sets the same.

The settings are those of the published files; the text around them is not.
"""

from dataclasses import dataclass
from pathlib import Path

MS1MV2, MS1MV3, GLINT = (
    ("faces_emore", 85742, 5822653),
    ("ms1m-retinaface-t1", 93431, 5179510),
    ("glint360k", 360232, 17091657),
)
WF12M, FLIP = ("WebFace12M", 617970, 12720066), ("WebFace12M_FLIP40", 617970, 12720066)
CONFLICT, WF42M = ("WebFace12M_Conflict", 1017970, 12720066), ("WebFace42M", 2059906, 42474557)
ARC, COS = (1.0, 0.5, 0.0), (1.0, 0.0, 0.4)
TENTH, EIGHTH = "config.num_epoch // 10", "config.num_epoch // 8"
THREE = ["lfw", "cfp_fp", "agedb_30"]


@dataclass(frozen=True)
class Published:
    name: str
    network: str
    margin: tuple[float, float, float]
    data: tuple[str, int, int]
    batch_size: int
    lr: float
    num_epoch: int
    warmup_epoch: str
    gpus: int
    """As the name says; 8 where it says nothing."""
    sample_rate: float = 1.0
    weight_decay: float = 5e-4
    optimizer: str = "sgd"
    verbose: int = 2000
    val_targets: bool = False
    more: str = ""

    def write(self, folder: Path) -> Path:
        rec, num_classes, num_image = self.data
        lines = [
            "from easydict import EasyDict as edict",
            "config = edict()",
            f"config.margin_list = {self.margin}",
            f"config.network = {self.network!r}",
            "config.resume = False",
            "config.output = None",
            "config.embedding_size = 512",
            f"config.sample_rate = {self.sample_rate}",
            "config.fp16 = True",
            f"config.weight_decay = {self.weight_decay}",
            f"config.batch_size = {self.batch_size}  # per GPU",
            f"config.optimizer = {self.optimizer!r}",
            f"config.lr = {self.lr}",
            f"config.verbose = {self.verbose}",
            f"config.rec = '/train_tmp/{rec}'",
            f"config.num_classes = {num_classes}",
            f"config.num_image = {num_image}",
            f"config.num_epoch = {self.num_epoch}",
            f"config.warmup_epoch = {self.warmup_epoch}",
            f"config.val_targets = {THREE if self.val_targets else []}",
            self.more,
        ]
        path = folder / f"{self.name}.py"
        path.write_text("\n".join(lines) + "\n")
        return path

    @property
    def warmup(self) -> int:
        shares = {TENTH: self.num_epoch // 10, EIGHTH: self.num_epoch // 8}
        return shares[self.warmup_epoch] if self.warmup_epoch in shares else int(self.warmup_epoch)


def _vit(name: str, network: str, batch_size: int, gpus: int, more: str = "") -> Published:
    return Published(
        name, network, COS, WF42M, batch_size, 0.001, 40, TENTH, gpus, 0.3, 0.1, "adamw", more=more
    )  # fmt: skip


def _wf42m(name: str, network: str, batch_size: int, lr: float, warmup: str, gpus: int, **more: object) -> Published:
    return Published(name, network, COS, WF42M, batch_size, lr, 20, warmup, gpus, **{"val_targets": True, **more})


FILTER = "config.interclass_filtering_threshold = 0.4"
PUBLISHED = [
    Published("glint360k_mbf", "mbf", COS, GLINT, 128, 0.1, 20, "0", 8, weight_decay=1e-4, val_targets=True),
    Published("glint360k_r50", "r50", COS, GLINT, 128, 0.1, 20, "0", 8, weight_decay=1e-4, val_targets=True),
    Published("glint360k_r100", "r100", COS, GLINT, 128, 0.1, 20, "0", 8, weight_decay=1e-4, val_targets=True),
    Published("glint360k_r100_bs4k_16gpus", "r100", COS, GLINT, 256, 0.4, 20, "2", 16, verbose=5000, val_targets=True),
    Published("glint360k_mobileface_bs4k", "mbf", COS, GLINT, 512, 0.4, 20, "2", 8, weight_decay=1e-4, val_targets=True),
    Published("ms1mv2_mbf", "mbf", ARC, MS1MV2, 128, 0.1, 40, "0", 8, weight_decay=1e-4, val_targets=True),
    Published("ms1mv2_r50", "r50", ARC, MS1MV2, 128, 0.1, 20, "0", 8, weight_decay=1e-4, val_targets=True),
    Published("ms1mv2_r100", "r100", ARC, MS1MV2, 128, 0.1, 20, "0", 8, val_targets=True),
    Published("ms1mv3_mbf", "mbf", ARC, MS1MV3, 128, 0.1, 40, "0", 8, weight_decay=1e-4, val_targets=True),
    Published("ms1mv3_r50", "r50", ARC, MS1MV3, 128, 0.1, 20, "0", 8, val_targets=True),
    Published("ms1mv3_r100", "r100", ARC, MS1MV3, 128, 0.2, 25, "0", 8, val_targets=True),
    Published("ms1mv3_r50_onegpu", "r50", ARC, MS1MV3, 128, 0.02, 20, "0", 1, val_targets=True),
    Published("ms1mv3_r2060", "r2060", ARC, MS1MV3, 64, 0.1, 25, "-1", 8, val_targets=True),
    Published("wf12m_conflict_r50", "r50", COS, CONFLICT, 128, 0.1, 20, TENTH, 8),
    Published("wf12m_conflict_r50_pfc03_filter04", "r50", COS, CONFLICT, 128, 0.1, 20, TENTH, 8, 0.3, more=FILTER),
    Published("wf12m_flip_pfc01_filter04_r50", "r50", COS, FLIP, 128, 0.1, 20, TENTH, 8, 0.1, more=FILTER),
    Published("wf12m_flip_pfc02_filter04_r50", "r50", COS, FLIP, 128, 0.1, 20, TENTH, 8, 0.2, more=FILTER),
    Published("wf12m_flip_r50", "r50", COS, FLIP, 128, 0.1, 20, TENTH, 8),
    Published("wf12m_mbf", "mbf", COS, WF12M, 128, 0.1, 20, "0", 8, weight_decay=1e-4),
    Published("wf12m_pfc02_r100", "r100", COS, WF12M, 128, 0.1, 20, "0", 8, 0.2),
    Published("wf12m_r50", "r50", COS, WF12M, 128, 0.1, 20, "0", 8),
    Published("wf12m_r100", "r100", COS, WF12M, 128, 0.1, 20, "0", 8),
    _wf42m("wf42m_pfc0008_32gpu_r100", "r100", 512, 0.4, TENTH, 32, sample_rate=0),
    _wf42m("wf42m_pfc02_16gpus_mbf_bs8k", "mbf", 512, 0.4, "2", 16, sample_rate=0.2, weight_decay=1e-4, val_targets=False),
    _wf42m("wf42m_pfc02_16gpus_r100", "r100", 256, 0.3, "1", 16, sample_rate=0.2),
    _wf42m("wf42m_pfc02_16gpus_r50_bs8k", "r50", 512, 0.6, "4", 16, sample_rate=0.2, verbose=10000),
    _wf42m("wf42m_pfc02_32gpus_r50_bs4k", "r50", 128, 0.4, "2", 32, sample_rate=0.2, verbose=10000),
    _wf42m("wf42m_pfc02_8gpus_r50_bs4k", "r50", 512, 0.4, "2", 8, sample_rate=0.2, verbose=10000),
    _wf42m("wf42m_pfc02_r100", "r100", 128, 0.1, "0", 8, sample_rate=0.2, verbose=10000),
    _wf42m("wf42m_pfc02_r100_16gpus", "r100", 128, 0.2, TENTH, 16, sample_rate=0.2, verbose=10000),
    _wf42m("wf42m_pfc02_r100_32gpus", "r100", 128, 0.4, TENTH, 32, sample_rate=0.2, verbose=10000),
    _wf42m("wf42m_pfc03_32gpu_r18", "r18", 128, 0.4, TENTH, 32, sample_rate=0.3),
    _wf42m("wf42m_pfc03_32gpu_r50", "r50", 128, 0.4, TENTH, 32, sample_rate=0.3),
    _wf42m("wf42m_pfc03_32gpu_r100", "r100", 128, 0.4, TENTH, 32, sample_rate=0.3),
    _wf42m("wf42m_pfc03_32gpu_r200", "r200", 128, 0.4, TENTH, 32, sample_rate=0.3),
    _vit("wf42m_pfc03_40epoch_64gpu_vit_t", "vit_t_dp005_mask0", 384, 64),
    _vit("wf42m_pfc03_40epoch_64gpu_vit_s", "vit_s_dp005_mask_0", 384, 64),
    _vit("wf42m_pfc03_40epoch_64gpu_vit_b", "vit_b_dp005_mask_005", 384, 64),
    _vit("wf42m_pfc03_40epoch_64gpu_vit_l", "vit_l_dp005_mask_005", 384, 64),
    _vit("wf42m_pfc03_40epoch_8gpu_vit_t", "vit_t_dp005_mask0", 512, 8),
    _vit("wf42m_pfc03_40epoch_8gpu_vit_b", "vit_b_dp005_mask_005", 256, 8, more="config.gradient_acc = 12"),
    Published(
        "wf42m_pfc02_vit_h", "vit_h", COS, WF42M, 768, 0.001, 16, EIGHTH, 8, 0.5, 0.1, "adamw",
        more="config.dali = True\nconfig.dali_aug = True",
    ),
    Published(
        "3millions", "mbf", COS, ("synthetic", 300000, 100000), 512, 0.1, 30, "-1", 8, 0.1,
        more="config.rec = 'synthetic'\nconfig.num_classes = 30 * 10000",
    ),
]  # fmt: skip
