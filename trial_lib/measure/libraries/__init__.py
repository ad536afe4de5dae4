"""DeepSpeed, Accelerate and the Trainer in a trial: each follows the candidate."""
