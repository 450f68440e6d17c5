"""SGLang's HTTP endpoints in front of an Engine (paths, shapes and codes of SGLang 0.5.18)."""

import asyncio
import functools
import hmac
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse

from wsync._core import StateError, WsyncError, __version__
from wsync.demo.engines import request_bodies as bodies
from wsync.demo.engines.gate import REQUEST_SECONDS
from wsync.machine.deadline import Deadline

if TYPE_CHECKING:
    from wsync.demo.engines.transformers import Engine, Generation

T = TypeVar("T")

_THREADS = 32


def _threaded(function: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    """An endpoint of a function that blocks, in threads of its own: requests that wait hold a
    thread each, and must not lock out those that end their wait."""
    pool = ThreadPoolExecutor(_THREADS, f"wsync-{function.__name__}")

    @functools.wraps(function)
    async def endpoint(*given: Any, **named: Any) -> T:
        call = functools.partial(function, *given, **named)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    return endpoint


def build_app(engine: "Engine", *, api_key: str | None = None) -> FastAPI:
    """The endpoints around `engine`, which is at `app.state.engine`."""
    app = FastAPI(title="wsync.demo.engines.transformers", version=__version__)
    app.state.engine = engine
    _add_rules(app, api_key)
    _add_information(app, engine)
    _add_generation(app, engine)
    _add_weights(app, engine)
    return app


def _add_rules(app: FastAPI, api_key: str | None) -> None:
    """Authorization, and SGLang's codes for errors."""

    async def authorize(
        request: Request, proceed: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        shown = request.headers.get("authorization", "").encode()
        if (
            # the server's path: a URL has the client's Host header in it
            request.scope["path"] != "/health"
            and not hmac.compare_digest(shown, f"Bearer {api_key}".encode())
        ):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await proceed(request)

    if api_key is not None:  # it takes its time in each request
        app.middleware("http")(authorize)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return _error(f"{where}: {first['msg']}")

    @app.exception_handler(WsyncError)
    async def failed(request: Request, error: WsyncError) -> Response:
        return _error(str(error))


def _add_information(app: FastAPI, engine: "Engine") -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return engine.model_info()

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "model_path": engine.model_path,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "custom_weight_loader": ["wsync.sglang.load_weights"],
            "version": f"wsync {__version__}",
            "instance": engine.instance,
            "internal_states": [],
        }

    @app.api_route("/weights_checker", methods=["GET", "POST"])
    @_threaded
    def weights_checker() -> Any:
        sums = engine.checksums()
        digest = sha256(repr(sorted(sums.items())).encode()).hexdigest()
        rank = {
            "checksums": sums,
            "per_gpu_checksum": digest,
            "parallelism_info": {"tp_rank": 0, "tp_size": 1},
        }
        return {"success": True, "message": "", "ranks": [rank], "per_engine_checksum": digest}


def _add_generation(app: FastAPI, engine: "Engine") -> None:
    @app.post("/pause_generation")
    @_threaded
    def pause(body: bodies.Pause | None = None) -> Response:
        mode = (body or bodies.Pause()).mode
        call = functools.partial(engine.gate.pause, mode, REQUEST_SECONDS)
        return _obey(call, f"Generation paused: {mode}.")

    @app.post("/continue_generation")
    @_threaded
    def resume() -> Response:
        return _obey(lambda: engine.resume(REQUEST_SECONDS), "Generation continued.")

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush() -> Response:
        try:
            engine.gate.flush()
        except StateError as error:
            return PlainTextResponse(str(error), 400)
        return PlainTextResponse("Cache flushed.\n")

    @app.post("/abort_request")
    async def abort(body: bodies.Abort) -> Response:
        engine.gate.abort(None if body.abort_all else body.rid)
        return Response(status_code=200)

    @app.post("/generate")
    @_threaded
    def generate(body: bodies.Generate) -> Response:
        """One answer for one prompt, a list of answers for a list of prompts."""
        if (body.text is None) == (body.input_ids is None):
            return _error("give either text or input_ids")
        given: Any = body.text if body.input_ids is None else body.input_ids
        single = isinstance(given, str) or not given or isinstance(given[0], int)
        answers = []
        for prompt in [given] if single else given:
            ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
            done = engine.generate(ids, body.sampling_params, body.rid)
            answers.append(_answer(engine, ids, done, body.return_logprob))
        return JSONResponse(answers[0] if single else answers)

    @app.post("/wsync/logits")
    @_threaded
    def logits(body: bodies.Logits) -> Response:
        """Ours: fp32 logits [tokens, vocab] of a prompt, for comparisons."""
        return JSONResponse({"logits": engine.logits(body.input_ids)})


def _obey(call: Callable[[], object], done: str) -> Response:
    """A pause or its end."""
    try:
        call()
    except StateError as error:
        return JSONResponse({"message": str(error), "status": "error"}, 400)
    return JSONResponse({"message": done, "status": "ok"})


def _answer(
    engine: "Engine", prompt: list[int], done: "Generation", logprobs: bool
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": done.rid,
        "finish_reason": done.finish,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(done.output_ids),
        "weight_version": done.weight_version,
    }
    if logprobs:
        pairs = zip(done.logprobs, done.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {
        "text": engine.decode(done.output_ids),
        "output_ids": done.output_ids,
        "meta_info": meta,
    }


def _add_weights(app: FastAPI, engine: "Engine") -> None:
    """Endpoints that call the engine's method of their name with the fields of a body."""
    group = "custom process group"
    # name, body, text of success, and what an error begins with
    for name, kind, done, failed in (
        ("update_weights_from_tensor", bodies.Update, "Success", ""),
        ("update_weight_version", bodies.NewVersion, "", ""),
        (
            *("update_weights_from_disk", bodies.FromDisk),
            *("Succeeded to update model weights.", "Failed to update weights: "),
        ),
        (
            *("init_weights_update_group", bodies.NewGroup),
            *(f"Succeeded to initialize {group}.", f"Failed to initialize {group}: "),
        ),
        ("destroy_weights_update_group", bodies.NamedGroup, f"Succeeded to destroy {group}.", ""),
        (
            *("update_weights_from_distributed", bodies.FromDistributed),
            *("Succeeded to update parameter online.", "Failed to update parameter online: "),
        ),
    ):
        app.post(f"/{name}")(_request(engine, name, kind, done, failed))


def _request(
    engine: "Engine", name: str, kind: Any, done: str, failed: str
) -> Callable[..., Awaitable[Response]]:
    @_threaded
    def endpoint(body: kind) -> Response:
        told = body.model_dump()
        if told.pop("abort_all_requests", False):
            engine.gate.abort(None)
        extra: dict[str, Any] = {}
        if kind is bodies.FromDisk:
            extra["num_paused_requests"] = 0
        if kind is bodies.NewVersion:
            extra["new_version"] = told["new_version"]
        end = Deadline(REQUEST_SECONDS)
        try:
            text = getattr(engine, name)(**told, end=end)
        except Exception as error:  # torch's, too, of a content that is none of a tensor's
            known = isinstance(error, WsyncError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            return _outcome(False, failed + reason, **extra)
        return _outcome(True, text or done, **extra)

    return endpoint


def _outcome(success: bool, message: str, **more: Any) -> Response:
    body = {"success": success, "message": message, **more}
    return JSONResponse(body, 200 if success else 400)


def _error(message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, 400)
