"""The public inference API: `megaclass.load` opens a trained model.

The model embeds, classifies, compares, verifies and searches images.

import megaclass
model = megaclass.load("runs/demo")
print(model.similarity(["anna.jpg", "anna-again.jpg", "bert.jpg"]))
print(model.verify("anna.jpg", "anna-again.jpg"))
print(model.classify("anna.jpg")[0])
print(model.index("photos/").search("anna.jpg", k=5))
"""

from megaclass.inference.classes import Classification as Classification
from megaclass.inference.classes import Guess as Guess
from megaclass.inference.image_index import ImageInput as ImageInput
from megaclass.inference.load import load as load
from megaclass.inference.load import read_run_state as read_run_state
from megaclass.inference.loaded_model import ImageTreatment as ImageTreatment
from megaclass.inference.loaded_model import LoadedModel as LoadedModel
from megaclass.inference.loaded_model import weights_fingerprint as weights_fingerprint
