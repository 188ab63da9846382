"""The public inference API: `megaclass.load` opens a trained model, which embeds, compares, verifies and searches images.

import megaclass
model = megaclass.load("runs/demo")
print(model.similarity(["anna.jpg", "anna-again.jpg", "bert.jpg"]))
print(model.verify("anna.jpg", "anna-again.jpg"))
print(model.index("photos/").search("anna.jpg", k=5))
"""

from megaclass.model.image_inputs import ImageInput as ImageInput
from megaclass.model.load import load as load
from megaclass.model.load import read_run_state as read_run_state
from megaclass.model.loaded_model import ImageTreatment as ImageTreatment
from megaclass.model.loaded_model import LoadedModel as LoadedModel
from megaclass.model.loaded_model import weights_fingerprint as weights_fingerprint
