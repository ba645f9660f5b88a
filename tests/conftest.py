"""Ctrl-C works in the tests, and in what they start, also where a shell runs them in the background and has it ignored."""

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
