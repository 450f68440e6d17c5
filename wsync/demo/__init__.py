"""Demonstrations: real trainers and engines that run on any machine."""

import warnings

# transformers causes it (through tqdm.auto) in notebooks without ipywidgets; no bar here needs them
warnings.filterwarnings("ignore", "IProgress not found")
