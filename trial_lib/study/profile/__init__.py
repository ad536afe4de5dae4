"""The profile trial: the program as it was typed, then with the smallest micro-batch that it takes."""
