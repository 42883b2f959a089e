"""Pictures for the vision-language models of transformers: the modality ``transformers``, and tiny models for tests.

:mod:`agl_vision.modality` turns pictures into tokens and tensors, :mod:`agl_vision.tiny` makes models on the spot.
"""
