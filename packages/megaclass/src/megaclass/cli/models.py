"""`megaclass classify`, `add-classes`, `search` and `push`."""

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path

from megaclass.cli.arguments import add_commands, writing
from megaclass.cli.hints import Commands
from megaclass_launch.errors import ConfigError
from megaclass_launch.wire.checks import plain_text

_logger = logging.getLogger("megaclass.cli")
_COMMANDS = """
classify: say of which class images are
    Names the closest classes of each image: megaclass classify runs/demo photos/ image.jpg --top 3
  @model
  images    path+ IMAGE  images, or folders of images
  --top     int=5        number of classes to name per image
  --reject  float SHARE  say "unknown" if the closest class is too far; at most this share of unknown images gets a name then
  @json @fit @resize @device @backbone

add-classes: add classes to a trained model, without training
    Exports the model with further classes, whose centres are the means of a few images each: megaclass add-classes
        runs/demo new-people/ --out with-new-people
  @model
  images  path DATA  images of the new classes, as for data.path: a folder per class
  --out   path!      folder for the exported model and its classes
  @fit @backbone

search: show the images of a folder that are most similar to a query image
    Shows the nearest images with their cosines, and writes them as a page: megaclass search runs/demo photos/ query.jpg
  @model
  gallery  path        folder of images, including subfolders, or embeddings.npy
  queries  path+ query    images to search for
  -k       int=5       number of images to show per query
  --out    path=search.html    page to write
  --faiss  text INDEX  search with faiss: Flat (exact), HNSW32 or another description for its index_factory
                (megaclass[retrieval])
  @fit @resize @device @backbone

push: publish a model on the Hugging Face Hub, with a model card
    Exports the model and uploads it: megaclass push runs/demo user/name --licence apache-2.0
  model           path RUN  run folder, or a model file
  repository      text      user/name; created if it does not exist
  --to            {formats}=safetensors    format of the model
  --private       flag      make a private repository
  --with-centres  flag      also publish the names and centres of the training classes
  @licence @backbone
"""


def add_model_commands(commands: Commands) -> None:
    """Adds the four commands to the parser's commands."""
    functions = {"classify": _classify, "add-classes": _add_classes, "search": _search, "push": _push}
    add_commands(commands, _COMMANDS, functions)


def _classify(options: argparse.Namespace, given: list[str]) -> int:
    import megaclass
    from megaclass.inference.image_index import listed_images

    model = megaclass.load(options.model, device=options.device, backbone=options.backbone)
    images = [image for path in options.images for image in listed_images(path)]
    found = model.classify(images, options.top, reject=options.reject, fit=options.fit, resize=options.resize)
    for image, one in zip(images, found, strict=True):
        if options.json:
            print(json.dumps({"image": str(image), **asdict(one)}))
            continue
        print(f"{image}{'' if one.is_known else ': unknown; the closest classes are'}")
        for place, guess in enumerate(one.guesses, start=1):
            chance = "" if guess.probability is None else f"  {guess.probability:6.1%}"
            print(f"  {place:3}  {guess.cosine:6.3f}{chance}  {guess.name}")
    if found[0].guesses[0].probability is None:
        _logger.info(
            "no probabilities: megaclass evaluate RUN --classify DATA fits their temperature on labelled images"
        )
    return 0


def _add_classes(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.export.run_export import add_classes

    centres = add_classes(Path(options.model), options.images, options.out, fit=options.fit, backbone=options.backbone)
    print(f"{options.out}: {centres.num_classes:,} classes; to use it: megaclass classify {options.out} IMAGE")
    return 0


def _search(options: argparse.Namespace, given: list[str]) -> int:
    import megaclass
    from megaclass.inference.search_page import write_search_page

    if options.k < 1:
        raise ConfigError(f"-k is {options.k}; it must be at least 1.")
    model = megaclass.load(options.model, device=options.device, backbone=options.backbone)
    index = model.index(options.gallery, faiss=options.faiss, fit=options.fit, resize=options.resize)
    found = index.search_all(options.queries, options.k)
    for query, neighbours in zip(options.queries, found, strict=True):
        print(plain_text(f"{query}: nearest of {len(index):,} images in {options.gallery}"))
        for place, one in enumerate(neighbours, start=1):
            # The list next to a gallery's .npy file may contain escape sequences.
            print(f"  {place:3}  {one.similarity:6.3f}  {plain_text(one.path)}")
    with writing(options.out):
        write_search_page(options.out, model, options.gallery, list(zip(options.queries, found, strict=True)))
    print(f"page: {options.out}")
    return 0


def _push(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.export.run_export import push

    address = push(
        options.model,
        options.repository,
        form=options.to,
        licence=options.licence,
        backbone=options.backbone,
        is_private=options.private,
        with_centres=options.with_centres,
    )
    print(f'published; to use it: megaclass.load("{address}")')
    return 0
