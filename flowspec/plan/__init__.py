"""Which box of a cluster gets which layers: needs in bytes, pass times, the exact best split.

Torch-free. ``boxes`` and ``needs`` describe the boxes and the model, ``split`` searches, ``layout``
lists the layouts worth a prediction, ``cluster_file`` is what a plan leaves behind.
"""
