"""The entry of the console script. It handles Ctrl-C before it imports anything that takes time.

Python raises KeyboardInterrupt from its own start on, and `site` is nearly all of the time until this file. Only a
`.pth` file could handle a signal earlier, and it would do so in every Python program of the environment.
"""

import gc

from zerotune.flows.interrupts import interrupts, switch_threads_often


def main() -> None:
    interrupts.listen()
    # The imports of a command make a million objects, none of which is garbage.
    gc.set_threshold(100_000)
    switch_threads_often()
    from zerotune.flows.command_line import run

    run()
