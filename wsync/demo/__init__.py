"""Demonstrations: real trainers and engines on any machine."""

import warnings

# of transformers, by way of tqdm.auto, in notebooks without ipywidgets; no bar here needs these
warnings.filterwarnings("ignore", "IProgress not found")
