"""A server with OpenAI's API on `samplers.Engine`: `python -m samplers serve --model DIR_OR_NAME`.

A request passes these modules:

    server         listens and shuts down; cli is its command line
    connections    bounds the number of connections and closes silent ones
    middleware     checks API key, host and body size; logs
    routes         one function per path; errors are what a request gets instead of an answer
    schemas        what a body may contain
    scheduler      admits requests, keeps deadlines, makes answers; shapes writes them, metrics counts them
    engine_thread  the thread that owns the engine

Importing this package needs nothing beyond the library; its modules need the extra `serve`.
"""
