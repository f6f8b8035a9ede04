"""Which files of a published model serving reads, as patterns of fnmatch."""

from __future__ import annotations

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
# The same weights in other layouts, in folders or for the publisher's own code. Pickle files are left where they are.
UNWANTED = ("*/*.safetensors", "consolidated*.safetensors", "onnx/*", "openvino/*", "original/*")
