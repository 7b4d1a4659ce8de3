"""Reads a file with Python's `safetensors` and compares it with a list of names, types, shapes and bytes.

Called by tests of consolidated checkpoints: read_safetensors.py FILE LIST.json
The list is {"tensors": {NAME: {"dtype", "shape", "hex"}}, "ties": {NAME: NAME}}.
"""

import json
import sys

from safetensors import deserialize, safe_open


def main(file, expected):
    with open(expected) as text:
        expected = json.load(text)
    tensors, ties = expected["tensors"], expected["ties"]
    with safe_open(file, framework="numpy") as opened:
        assert sorted(opened.keys()) == sorted(tensors), sorted(opened.keys())
        for name, other in ties.items():
            assert opened.metadata()[name] == other, opened.metadata()
        # NumPy has no bfloat16, so values are read by element type where it has one.
        for name, tensor in tensors.items():
            part = opened.get_slice(name)
            assert part.get_dtype() == tensor["dtype"] and part.get_shape() == tensor["shape"], name
            if tensor["dtype"] != "BF16":
                assert opened.get_tensor(name).tobytes().hex() == tensor["hex"], name
    with open(file, "rb") as data:
        for name, tensor in deserialize(data.read()):
            assert bytes(tensor["data"]).hex() == tensors[name]["hex"], name
    print(f"{len(tensors)} tensors are as expected")


main(*sys.argv[1:])
