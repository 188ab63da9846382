"""Writes trained models in forms that other tools read."""

EXPORTERS = {
    "onnx": "megaclass.export.onnx_file",
    "onnx-classifier": "megaclass.export.onnx_file:CLASSIFIER",
    "safetensors": "megaclass.export.safetensors_file",
    "insightface": "megaclass.export.insightface_file",
}
"""Module of each form of `megaclass export --to`, which defines EXPORTER, or the object behind the colon.

A new form is a file in this folder and a line here. The modules are named, not imported: the command line shows the forms
without loading torch."""

INSIGHTFACE_PACK = f"{EXPORTERS['insightface']}:PACK"
"""Exporter of "insightface" with a face detector."""
