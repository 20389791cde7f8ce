"""A gateway of several processes that listen on one host and port.

    parent           starts the processes, watches them, starts again what ended, stops them
    child            one process: a gateway as it would be alone, with settings of its own
    own_settings     which settings of the file are different in each process
    ports            holds the address for all of them
    siblings         pages that one process answers for all
    merged_metrics   one exposition for all processes

Each process is a gateway of its own, so all of them work together as several gateways do: through
`sharing`. The kernel gives every new connection to one of them (SO_REUSEPORT); the parent is on the
way of no request. The processes ask each other and the parent over Unix sockets in a folder that
only this user can enter.
"""
