"""A server in the shape of OpenAI's on `samplers.Engine`: `python -m samplers serve --model DIR_OR_NAME`.

    command   the command line            app       routes and errors         worker   the thread that owns the engine
    server    listening, ending           guard     key, hosts, sizes, log    service  admission, deadlines, answers
    connections  how many there may be, and how long a client may be silent
    schema    what a body may say         shapes    how an answer is written  metrics  numbers for Prometheus

Importing this package needs nothing beyond the library; its modules need the extra `serve`.
"""
