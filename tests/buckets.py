"""Google Cloud Storage over loopback, for the tests of object stores."""

import contextlib
import functools
import http.server
import io
import logging
import os
import threading
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


class Server(http.server.HTTPServer):
    request_queue_size = 128

    def handle_error(self, *_):
        """Clients hang up early, and are killed."""


class Handler(RequestHandler):
    """The emulator, and what TensorStore needs besides: generations of what is read, writes on condition of them."""

    def parse_request(self):
        if not super().parse_request():
            return False
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.rfile = io.BytesIO(body)
        status = self.server.answers(self.command, f"{unquote(self.path)} {body[:1000]}")
        wanted = self.asked("ifGenerationMatch")
        if self.command == "POST" and wanted is not None and wanted != self.generation(self.asked("name")):
            status = status or 412
        if status:
            self.send_error(status)
        return not status

    def end_headers(self):
        if self.command == "GET" and self.asked("alt") == "media":
            self.send_header(
                "x-goog-generation", self.generation(unquote(urlsplit(self.path).path.partition("/o/")[2]))
            )
        super().end_headers()

    def asked(self, name):
        return parse_qs(urlsplit(self.path).query).get(name, [None])[0]

    def generation(self, name):
        try:
            return self.storage.get_file_obj(Bucket.name, name)["generation"]
        except NotFound:
            return "0"


class Bucket:
    """An emulator with a bucket, for this process and for those that it starts.

    Attributes:
        name: of the bucket.
        environment: what makes gcsfs, TensorStore and Google's own client find it.
    """

    name = "bucket"

    def __init__(self):
        storage = Storage(use_memory_fs=True)
        buckets.create_bucket(self.name, storage)
        self._server = Server(("127.0.0.1", 0), functools.partial(Handler, storage))
        self._server.answers = lambda command, asked: None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anybody",
            "GOOGLE_CLOUD_PROJECT": "project",
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    @property
    def files(self):
        """The file system, with nothing remembered."""
        store = fsspec.filesystem("gcs", finalize_on_close=True)
        store.invalidate_cache()
        return store

    def fetched(self, address, to):
        """A local copy of a folder."""
        self.files.get(address, str(to), recursive=True)
        return to

    @contextlib.contextmanager
    def answering(self, answers):
        """Answers requests with what this gives for their method and their address with the beginning of what they
        send; as usual where that is None."""
        usual, self._server.answers = self._server.answers, answers
        yield
        self._server.answers = usual


@contextlib.contextmanager
def serving():
    """A `Bucket` that everything in this process finds."""
    for name in ("gcp_storage_emulator", "gcsfs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    found = Bucket()
    with mock.patch.dict(os.environ, found.environment), mock.patch.dict(fsspec.config.conf):
        fsspec.config.set_conf_env(fsspec.config.conf)  # as it was read when fsspec was imported
        yield found
    found.close()
