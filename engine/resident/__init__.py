"""The resident engine: one process that keeps the weights, the prompt cache and the finished runs for every client.

`place` is the runtime directory and the lock that says who is alive, `launch` starts the process, `server` is its
socket loop, `worker` its engine thread, `peers` what is owed to each client, `runs` what is kept.
Importing this package or `place` and `launch` loads neither torch nor zmq, so that a client may use them.
"""
