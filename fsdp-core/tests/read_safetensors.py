"""Reads a file with Python's `safetensors` and compares it with a list of names, types, shapes and bytes.

Called by the test of `fsdp consolidate`: read_safetensors.py FILE LIST.json
"""

import json
import sys

from safetensors import deserialize, safe_open


def main(file, expected):
    with open(expected) as text:
        expected = json.load(text)
    with safe_open(file, framework="numpy") as opened:
        assert sorted(opened.keys()) == sorted(expected), sorted(opened.keys())
        assert opened.metadata()["head.weight"] == "tokens.weight", opened.metadata()
        # NumPy has no bfloat16, so values are read by element type where it has one.
        for name, tensor in expected.items():
            part = opened.get_slice(name)
            assert part.get_dtype() == tensor["dtype"] and part.get_shape() == tensor["shape"], name
            if tensor["dtype"] != "BF16":
                assert opened.get_tensor(name).tobytes().hex() == tensor["hex"], name
    with open(file, "rb") as data:
        for name, tensor in deserialize(data.read()):
            assert bytes(tensor["data"]).hex() == expected[name]["hex"], name
    print(f"{len(expected)} tensors are as expected")


main(*sys.argv[1:])
