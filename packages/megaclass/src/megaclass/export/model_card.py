"""Writes the model card of an export (README.md): what the model is, its numbers, and how to use it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.results import headline, read_results, remarks_on
from megaclass.image_size import shown_size
from megaclass.metrics_file import read_summary

# Those of the Hub's identifiers that models usually have.
_HUB_LICENCES = {
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "openrail", "unlicense"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
}


def model_card(config: Mapping[str, Any], run: Path | None, licence: str, usage: str) -> str:
    """Returns the text. run: folder with the summary and evaluation of training; None for a model without a run."""
    summary = read_summary(run) if run is not None else {}
    results = read_results(run) if run is not None else []
    return "\n".join(
        [
            "---",
            *_licence_lines(licence),
            "library_name: megaclass",
            "---",
            "",
            f"# {config['name']}",
            "",
            f"Backbone {config['backbone']}, {config['embedding_dim']} numbers per embedding, images of "
            f"{shown_size(config['image_size'])} pixels. Trained and exported with Megaclass "
            f"{config['version']}.",
            "",
            "## Data",
            "",
            *_data_lines(summary),
            *_class_lines(config),
            "",
            "## Numbers",
            "",
            *_number_lines(results),
            "",
            "## Licence",
            "",
            f"{licence}. A model's licence also depends on that of the data it was trained on.",
            "",
            "## How to use",
            "",
            f"Input: {config['input']}. Output: {config['output']}.",
            "Images of faces must be aligned by five landmarks in the same way as the training data.",
            "",
            usage.replace("{insightface_name}", str(config["insightface_name"])).replace(
                "{embedding_dim}", str(config["embedding_dim"])
            ),
            "",
        ]
    )


def _licence_lines(licence: str) -> list[str]:
    """Returns the licence as the Hugging Face Hub accepts it: an identifier that it knows, or "other" with a name."""
    if licence.lower() in _HUB_LICENCES:
        return [f"license: {licence.lower()}"]
    return ["license: other", f"license_name: {json.dumps(licence)}"]


def _data_lines(summary: Mapping[str, Any]) -> list[str]:
    if "num_classes" not in summary:
        return ["Not known: the model was not exported from a run folder."]
    lines = [f"- {summary['num_images']:,} images of {summary['num_classes']:,} classes"]
    if "data_fingerprint" in summary:
        lines.append(f"- fingerprint {summary['data_fingerprint']}")
    return [*lines, f"- {summary['steps']:,} steps on {summary['world_size']} rank(s)"]


def _class_lines(config: Mapping[str, Any]) -> list[str]:
    if not config.get("num_classes"):
        return []
    return [f"- classifies {config['num_classes']:,} classes: names and centres in centres.safetensors, if it is here"]


def _number_lines(results: list[SetResult]) -> list[str]:
    done = [result for result in results if result.error is None]
    if not done:
        return ["None yet: run `megaclass evaluate RUN --on SETS`, then export again."]
    lines = ["| set | protocol | number |", "|---|---|---|"]
    for result in done:
        protocol = PROTOCOLS[result.kind].card_name
        if result.numbers.get("mirror") is False:
            protocol = protocol.replace(", both flips", "") + ", not mirrored"
        lines.append(f"| {result.name} | {protocol} | {headline(result)} |")
    remarks = [f"- {result.name}: {said}" for result in done for said in remarks_on(result)]
    return [*lines, "", *remarks] if remarks else lines
