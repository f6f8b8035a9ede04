"""The files of a published model that serving reads, as patterns of fnmatch."""

from __future__ import annotations

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
# The same weights in other layouts: in folders, or for the publisher's own code. Pickle files match no pattern.
UNWANTED = ("*/*.safetensors", "consolidated*.safetensors", "onnx/*", "openvino/*", "original/*")
