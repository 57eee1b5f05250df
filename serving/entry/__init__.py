"""What runs inside the server: `repository.write` copies each module here verbatim into a model's version folder.

A module here stands alone (it imports nothing from this project) and needs numpy, onnxruntime, tokenizers and
Triton's own `triton_python_backend_utils` only.
"""
