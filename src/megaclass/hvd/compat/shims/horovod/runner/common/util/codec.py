import base64
import pickle
from typing import Any


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Returns the object pickled with cloudpickle, as base64."""
    import cloudpickle

    encoded = base64.b64encode(cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    return pickle.loads(base64.b64decode(encoded))
