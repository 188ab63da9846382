"""Exports a run to a folder that others can use: the model in one of the forms below, config.json and a model card.

    safetensors   model.safetensors, and centres.safetensors with the class centres by name
    onnx          model.onnx for any batch size, as InsightFace's tools expect it
    insightface   backbone.pth, the state dict that InsightFace's arcface_torch loads; with a face detector a model pack

Each file is opened again and must give the embeddings of the model before the folder appears.
"""

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megaclass
from megaclass.data.decode import Fit
from megaclass.errors import ExportError
from megaclass.evaluation.centres import CENTRES_FILE, ModelCentres
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.report.templates import render
from megaclass.evaluation.results import headline, read_results, remarks_on
from megaclass.export import EXPORTERS, INSIGHTFACE_PACK
from megaclass.export.check import Exporter, ExportJob
from megaclass.image_size import has_rows, shown_size, size_to_text
from megaclass.inference import LoadedModel, load
from megaclass.inference.classes import with_added_classes
from megaclass.inference.load import HUB_PREFIX, hub_library
from megaclass.insightface.names import INSIGHTFACE_NAMES
from megaclass.metrics_file import read_summary
from megaclass_launch.files import published_folder

_CONFIG_FILE, _CARD_FILE = "config.json", "README.md"
# Keys of config.json that also go into the metadata of the model file.
_METADATA_KEYS = ("format", "version", "backbone", "embedding_dim", "image_size", "fit", "mirror")


def export_model(
    path: Path,
    form: str,
    out: Path,
    *,
    licence: str = "not stated",
    backbone: str | None = None,
    centres: ModelCentres | None = None,
    detector: Path | None = None,
) -> Path:
    """Exports a run folder, or any model file that `megaclass.load` opens, to the folder `out`.

    form: a key of EXPORTERS. backbone: as for `megaclass.load`.
    centres: instead of those of the model.
    detector: ONNX file of a face detector, with which "insightface" becomes a pack that FaceAnalysis loads.
    An earlier export of the same form at `out` is replaced; a folder that holds anything else is refused.
    """
    if detector is not None and form != "insightface":
        raise ExportError(f"A face detector belongs to an export to insightface, not to {form}: leave out --detector.")
    module, _, name = (EXPORTERS[form] if detector is None else INSIGHTFACE_PACK).partition(":")
    exporter: Exporter = getattr(importlib.import_module(module), name or "EXPORTER")
    _require_own_folder(out, form, exporter)
    model = load(path, device="cpu", backbone=backbone)
    if model.backbone == "onnx":
        raise ExportError(
            f"{path} is an ONNX model, which has no parameters that could be exported. Export the run it came from."
        )
    run = path if path.is_dir() else None
    # The exported model verifies and rejects with the thresholds of its run.
    config = {**_config(model, exporter), "verification": {}, "classification": {}, **model.facts}
    # A run whose checkpoints were deleted has no centres; its model is exported without them.
    if centres is None and model.has_centres:
        centres = model.centres
    config["num_classes"] = 0 if centres is None else centres.num_classes
    metadata = {key: _as_text(config[key]) for key in _METADATA_KEYS if key in config}
    with published_folder(out.resolve()) as unfinished:
        job = ExportJob(
            model=model, run=run, centres=centres, folder=unfinished, out=out, metadata=metadata, detector=detector
        )
        exporter.write(job)
        (unfinished / _CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (unfinished / _CARD_FILE).write_text(_model_card(config, run, licence, exporter.usage), encoding="utf-8")
    return out


def _require_own_folder(out: Path, form: str, exporter: Exporter) -> None:
    """Refuses a folder with other content, which a user may have named by mistake."""
    if not out.is_dir():
        return
    own = {exporter.file, *exporter.extra_files, _CONFIG_FILE, _CARD_FILE}
    foreign = sorted({file.name for file in out.iterdir()} - own)
    if foreign:
        raise ExportError(
            f"{out} holds {foreign[0]}, which does not belong to an export to {form}: name another folder with --out."
        )


def _config(model: LoadedModel, exporter: Exporter) -> dict[str, Any]:
    return {
        "format": "megaclass",
        "version": megaclass.__version__,
        "name": model.name,
        "file": exporter.file,
        "backbone": model.backbone,
        "insightface_name": INSIGHTFACE_NAMES.get(model.backbone),
        "embedding_dim": model.embedding_dim,
        "image_size": model.image_size,
        **({"fit": model.treatment.fit} if model.treatment.fit is not None else {}),
        "mirror": model.treatment.mirror,
        "input": "float32 (batch, features)"
        if has_rows(model.image_size)
        else "float32 (batch, 3, height, width), RGB, (x - 127.5) / 127.5",
        "output": "float32 (batch, embedding_dim), not normalised",
    }


def _as_text(value: Any) -> str:
    """Returns the value as the metadata of a model file states it."""
    if isinstance(value, bool):
        return str(value).lower()
    return size_to_text(value) if isinstance(value, tuple) else str(value)


def add_classes(
    path: Path, labelled: Path, out: Path, *, fit: Fit | None = None, backbone: str | None = None
) -> ModelCentres:
    """Exports the model to `out` with further classes, whose centres are the means of labelled images; nothing is trained."""
    model = load(path, device="cpu", backbone=backbone)
    fit, mirror = model.treatment.chosen(fit, None, resize=False)
    centres = with_added_classes(model, labelled, fit=fit, mirror=mirror)
    export_model(path, "safetensors", out, backbone=backbone, centres=centres)
    return centres


# Those of the Hub's identifiers that models usually have.
_HUB_LICENCES = {
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "openrail", "unlicense"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
}


_READ_IMAGE = """from PIL import Image

pixels = np.asarray(Image.open("first.jpg").convert("RGB"), dtype=np.float32)
batch = ((pixels - 127.5) / 127.5).transpose(2, 0, 1)[None]"""
_READ_FEATURES = 'batch = np.load("features.npy").astype(np.float32)'


def _model_card(config: Mapping[str, Any], run: Path | None, licence: str, usage: str) -> str:
    """Returns the text of README.md: what the model is, its numbers, and how to use it.

    run: folder with the summary and evaluation of training; None for a model without a run.
    """
    has_features = has_rows(config["image_size"])
    if has_features:
        usage = usage.replace('["first.jpg", "second.jpg"])  # aligned faces;', "features_NW)  # a matrix;")
    results = [one for one in read_results(run) if one.error is None] if run is not None else []
    return render(
        "export/model_card.md.j2",
        config=config,
        size=f"images of {shown_size(config['image_size'])} pixels"
        if not has_features
        else f"features of {shown_size(config['image_size'])}",
        has_features=has_features,
        summary=read_summary(run) if run is not None else {},
        results=[
            (one.name, _protocol(one, has_flips=not has_features), headline(one), remarks_on(one)) for one in results
        ],
        licence=licence,
        licence_lines="\n".join(_licence_lines(licence)),
        usage=usage.replace("{batch}", _READ_FEATURES if has_features else _READ_IMAGE)
        .replace("{insightface_name}", str(config["insightface_name"]))
        .replace("{embedding_dim}", str(config["embedding_dim"])),
    )


def _licence_lines(licence: str) -> list[str]:
    """Returns the licence as the Hugging Face Hub accepts it: an identifier that it knows, or "other" with a name."""
    if licence.lower() in _HUB_LICENCES:
        return [f"license: {licence.lower()}"]
    return ["license: other", f"license_name: {json.dumps(licence)}"]


def _protocol(result: SetResult, *, has_flips: bool) -> str:
    name = PROTOCOLS[result.kind].card_name
    if not has_flips:
        return name.replace(", both flips", "")
    return name.replace(", both flips", "") + ", not mirrored" if result.numbers.get("mirror") is False else name


# The names and centres of the training classes may be those of real people: they are published on request only.


def push(
    path: Path,
    repository: str,
    *,
    form: str = "safetensors",
    licence: str = "not stated",
    backbone: str | None = None,
    is_private: bool = False,
    with_centres: bool = False,
) -> str:
    """Exports the model, uploads model, config.json and model card in one commit, and returns the address for megaclass.load.

    repository: `user/name`; made if it does not exist. The token comes from `hf auth login` or the variable HF_TOKEN.
    """
    repository = repository.removeprefix(HUB_PREFIX)
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ExportError(f"Cannot push to {repository!r}: expected user/name.")
    if form == "onnx-classifier" and not with_centres:
        raise ExportError(
            "An export to onnx-classifier holds the names and centres of the training classes: add --with-centres to publish "
            "them, or choose another form with --to."
        )
    hub = hub_library("Publishing on the Hugging Face Hub")
    with tempfile.TemporaryDirectory() as temporary:
        folder = export_model(path, form, Path(temporary) / form, licence=licence, backbone=backbone)
        try:
            api = hub.HfApi()
            api.create_repo(repository, private=is_private or None, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                ignore_patterns=None if with_centres else [CENTRES_FILE],
                commit_message="Upload a model with megaclass push",
            )
        # The library and its HTTP client raise many types, without a common base class.
        except Exception as error:
            raise ExportError(
                f"Cannot push to {repository} on the Hugging Face Hub: {str(error).strip() or type(error).__name__}. "
                f"`hf auth login` or the variable HF_TOKEN gives the token."
            ) from error
    return f"{HUB_PREFIX}{repository}"
