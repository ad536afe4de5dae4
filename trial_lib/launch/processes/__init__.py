"""The ranks' side, in the user's environment: standard library, psutil, torch and DeepSpeed only."""
