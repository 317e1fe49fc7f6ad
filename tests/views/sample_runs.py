"""Records to render, made by hand."""

from __future__ import annotations

from tfmagic.run import Node, Picture, Round, Run, Stream, Token

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>&amp;"\'\u202e\x00</pre></div></u><!--🪁'


def full(streams: int = 2, tokens: int = 9) -> Run:
    """A finished run with a hit, two kept pictures, and rounds that draft three and accept two, one, none of them."""
    run = Run(
        id="abc12345", created=1e9, model="tiny", device="cpu", prompt="What flies?", chat="kites", turn=3,
        params={"temperature": 0.0, "max_tokens": 64}, status="done", prompt_tokens=4203, prefilled=4203,
        pictures=[Picture("a.png", 640, 480, 380, 1000, True), Picture("b.png", 32, 32, 1500, 1000, True)],
        ttft={"queue": 0.5, "prepare": 1.9, "restore": 2.4, "tower": 0.0, "prefill": 7.4, "first": 2.0, "total": 14.2},
        cached_tokens=4160, cache_source="ram", tower_calls=0, images_encoded=0, images_kept=2, total_ms=1834.2,
    )
    for i in range(streams):
        stream = Stream(seed=7 + i, first_ms=14.2, finish_reason="stop", tokens=[Token(0, "w0", "first")])
        while len(stream.tokens) < tokens:
            accepted = (2, 1, 0)[len(stream.rounds) % 3]
            for k in range(accepted + 1):
                n = len(stream.tokens)
                stream.tokens.append(Token(n, f" w{n}", "draft" if k < accepted else "plain"))
            ms = 14.2 + 10 * (len(stream.rounds) + 1)
            said = [token.piece for token in stream.tokens[-1 - accepted : -1]]
            pieces = [*said, " not", " so", " at"][:3]
            nodes = [Node(piece, k, 0.9 - 0.2 * k, k < accepted) for k, piece in enumerate(pieces)]
            source = "copy" if accepted else "block"
            stream.rounds.append(Round(ms, accepted + 1, source, nodes, 4 - accepted, 0.5, 7.0, 0.5, 6.0, 8.0))
        run.streams.append(stream)
    return run


def empty(status: str = "queued") -> Run:
    return Run(id="empty123", created=1e9, status=status, streams=[Stream()])


def hostile(streams: int = 16, tokens: int = 4096) -> Run:
    """Everything a person or a model can write is as bad as it gets, and as long."""
    run = full(streams, tokens)
    long = HOSTILE * 400
    run.id = HOSTILE
    run.prompt = run.system = run.error = run.note = run.miss = run.model = run.chat = run.device = long
    run.params = {"stop": [long] * 8}
    run.pictures = [Picture(long, 9, 9, 10 * i, 5, None) for i in range(400)]
    for stream in run.streams:
        for verified in stream.rounds:
            verified.nodes = [Node(long, k // 2, 0.5, k == 0) for k in range(15)]
        for i, token in enumerate(stream.tokens):
            token.piece = HOSTILE
            token.made = "draft" if i % 2 else "plain"
            token.logprob = -1.0
            token.top = [(1, HOSTILE, -1.0)] * 20
    return run
