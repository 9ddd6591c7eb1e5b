"""A server in the shape of OpenAI's on `samplers.Engine`: `python -m samplers serve --model DIR_OR_NAME`.

    cli          the command line                   server         listening and shutting down
    routes       paths and errors                   middleware     API key, hosts, body sizes, log
    connections  limits on connections and silence  scheduler      admission, deadlines, answers
    schemas      what a request may contain         shapes         how an answer is written
    metrics      numbers for Prometheus             engine_thread  the thread that owns the engine

Importing this package needs nothing beyond the library; its modules need the extra `serve`.
"""
