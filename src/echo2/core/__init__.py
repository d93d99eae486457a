"""Sans-io state machines and policies: events and `now` in, effects out.

Nothing in this package waits, sends, logs, tells time or draws random numbers.
"""
