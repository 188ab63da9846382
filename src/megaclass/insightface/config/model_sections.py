"""Translates the settings of InsightFace's configs about data, network and margin to sections of a recipe.

Each function appends a remark about everything that the recipe does not do in the same way.
"""

from collections.abc import Sequence

from megaclass.insightface.config.given import GivenSettings, Sections, Settings, is_number
from megaclass.insightface.config.known_settings import LOSSES
from megaclass.insightface.names import NETWORKS


def data_settings(given: GivenSettings, remarks: list[str]) -> Sections:
    """Translates the path of the data, the readers and the augmentations."""
    path = given.text("rec") if "rec" in given else ""
    if path == "synthetic":
        num_classes = given.integer("num_classes", least=1) if given.is_readable("num_classes") else 0
        if not num_classes:
            raise given.line_error("rec", "synthetic data needs config.num_classes.")
        num_images = given.integer("num_image", least=1) if given.is_readable("num_image") else None
        path = f"synthetic:{num_classes}" + (f"x{num_images}" if num_images else "")
    if not path:
        path = "SET-ME"
        remarks.append("rec is not set: set data.path to the folder of the data")
    data: Settings = {"path": path, "threads": max(1, given.integer("num_workers", least=0))}
    if given.flag("dali_aug"):
        if "dali" in given and not given.is_readable("dali"):
            raise given.error("dali", "expected True or False, because dali_aug depends on it")
        if given.flag("dali"):
            # The four augmentations and probabilities of InsightFace's DALI pipeline.
            data["augment"] = "low_resolution:0.1,blur:0.2,colour:0.2,grey:0.1"
            remarks.append(
                "dali_aug became data.augment: the same augmentations and probabilities, but Megaclass's own operations, "
                "which differ from DALI's in detail"
            )
        else:
            remarks.append("dali_aug was not carried over: InsightFace reads it only if dali is True")
    return {"data": data}


def backbone_settings(given: GivenSettings, remarks: list[str]) -> Sections:
    """Translates the name of the network, which stands for several settings of a recipe."""
    name = given.text("network")
    if name not in NETWORKS:
        raise given.error("network", f"unknown network; known networks are {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    backbone: Settings = {
        "name": network.name,
        "embedding_dim": given.integer("embedding_size", least=1),
        "drop_path": network.drop_path,
        "mask_patches": network.mask_patches,
        "checkpoint_activations": network.checkpoint_activations,
    }
    if name.endswith("mask_005"):
        remarks.append(
            f"the name {name} suggests 5 % masked patches, but InsightFace's code masks 10 %: backbone.mask_patches is 0.1"
        )
    if network.checkpoint_activations:
        remarks.append(
            f"InsightFace trains {name} with activation checkpointing: backbone.checkpoint_activations is true; false is "
            f"faster if memory allows"
        )
    return {"backbone": backbone}


def head_settings(given: GivenSettings, remarks: list[str]) -> Sections:
    """Translates margin, filter and sample rate."""
    head = _margin(given, remarks)
    threshold = given.number("interclass_filtering_threshold")
    if threshold > 0:
        head["filter_above"] = threshold
    head["sample_rate"] = given.number("sample_rate")
    return {"head": head}


def _margin(given: GivenSettings, remarks: list[str]) -> Settings:
    """Reads margin_list like InsightFace's CombinedMarginLoss: m3 > 0 means CosFace, whatever m1 and m2 are."""
    key, sizes = _margin_list(given)
    multiplier, angle, cosine = map(float, sizes)
    if cosine > 0:
        if (multiplier, angle) != (1, 0):
            remarks.append(
                f"margin_list = {sizes!r}: InsightFace's loss ignores m1 and m2 if m3 is above 0, and so does the recipe; "
                f"to use all three set head.margin = 'combined', head.m1, head.m2 and head.m3"
            )
        return {"margin": "cosface", "margin_size": cosine}
    if (multiplier, cosine) == (1, 0):
        return {"margin": "arcface", "margin_size": angle}
    raise given.error(key, "InsightFace's loss raises an error for these: expected m1 = 1 and m3 = 0, or m3 above 0")


def _margin_list(given: GivenSettings) -> tuple[str, Sequence[float]]:
    """Returns the setting that determines the margin, margin_list or the older loss, and m1, m2 and m3."""
    key, sizes = "margin_list", given.value("margin_list")
    if "loss" in given:
        loss = given.text("loss")
        if loss not in LOSSES:
            raise given.error("loss", f"expected {' or '.join(LOSSES)}")
        if "margin_list" not in given:
            key, sizes = "loss", LOSSES[loss]
        elif not isinstance(sizes, (list, tuple)) or tuple(sizes) != LOSSES[loss]:
            raise given.error("loss", f"it contradicts margin_list = {sizes!r}, and the current train_v2.py ignores it")
    if not (isinstance(sizes, (list, tuple)) and len(sizes) == 3 and all(map(is_number, sizes))):
        raise given.error(key, "expected three numbers (m1, m2, m3)")
    return key, sizes
