"""`tierkv why`: why something was not cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.client.blocking import Operator
    from tierkv.core.explanation import Asked, Namespace, Trace
    from tierkv.wire.messages import ExplainReply, StatusReply
    from tierkv_cli.why_words import Look, Verdict

UNKNOWN = 4
LOOKED_INTO = 8
"""So many of the nearest namespaces are searched for the prompt."""

LAST = 20


@click.command(short_help="Show why a prompt or a request was not cached.")
@click.argument("request", metavar="[REQUEST]", required=False)
@click.option(
    "--last",
    metavar="N",
    is_flag=False,
    flag_value=LAST,
    type=click.IntRange(1, 1_000),
    help="The last N misses. [N: 20]",
)
@click.option("--prompt-file", metavar="FILE", help="A prompt as text (UTF-8), as the engine gets it: raw.")
@click.option("--token-file", metavar="FILE", help="A prompt as token ids: a JSON list, or numbers one after another.")
@click.option("--model", metavar="MODEL", help="Of the prompt: a folder, a name, or 6 or more digits of a fingerprint.")
@click.option("--adapter", metavar="ADAPTER", help="Its LoRA adapter: a folder, a fingerprint, or `none`.")
@click.option("--tenant", metavar="SALT", help="Its salt, exactly; empty for none.")
@click.option(
    "--field",
    "fields",
    metavar="NAME=VALUE",
    multiple=True,
    help="Another field of the engine's identity, like layout.dtype=float16.",
)
@click.option("--tokenizer", metavar="DIR", help="Of --prompt-file: where it is. [default: as --model says]")
@json_option
@where_options
def command(
    *,
    where: Where,
    request: str | None,
    last: int | None,
    prompt_file: str | None,
    token_file: str | None,
    model: str | None,
    adapter: str | None,
    tenant: str | None,
    fields: tuple[str, ...],
    tokenizer: str | None,
    as_json: bool,
) -> int:
    """Show why a prompt or a request was not cached: which field of the identity differs, at which token the prompt
    leaves what is cached, in which tier each part of it lies, what is still being written, what was evicted when and
    for what reason. Nothing is changed by asking, no last use and no tier.

    --token-file or --prompt-file with --model tells of a prompt, as it would be found now; REQUEST of a request of a
    moment ago, as it was; --last lists the last misses.

    REQUEST is the engine's id of a request (vLLM's own, what is passed to transformers as `request_name`), the
    beginning of one, or a grant id in hexadecimal. The node remembers some thousand of the last requests.

    A prompt is looked for in the namespaces that fit what is said of it, and in those that are nearest. What is not
    said is not compared. The text of --prompt-file is tokenized as it is, with the tokenizer's own special tokens and
    without a chat template: a chat has to be written with the markers that the template puts around it. The tokenizer
    needs the extra `transformers` and is looked for on this machine only; --token-file needs nothing.

    Exit code 4 when the node remembers no such request.
    """
    from tierkv_cli.prompts import usage
    from tierkv_cli.reach import operator

    asked = [one is not None for one in (request, last, prompt_file, token_file)]
    if sum(asked) != 1:
        raise usage("say one of REQUEST, --last, --prompt-file and --token-file")
    is_prompt = prompt_file is not None or token_file is not None
    if not is_prompt and (fields or any(one is not None for one in (model, adapter, tenant, tokenizer))):
        raise usage("--model, --adapter, --tenant, --field and --tokenizer are for a prompt")
    with operator(where) as node:
        if last is not None:
            return _show_last(node, last, as_json=as_json)
        if request is not None:
            return _show_request(node, request, as_json=as_json)
        tokens = _tokens(prompt_file, token_file, tokenizer or model)
        wanted = _wanted(node, where, model, adapter, tenant, fields)
        return _show_prompt(node, tokens, wanted, as_json=as_json)


# ---- what was asked for


def _tokens(prompt_file: str | None, token_file: str | None, tokenizer: str | None) -> list[int]:
    from tierkv_cli.prompts import read_tokens, tokenize, usage

    if token_file is not None:
        return read_tokens(token_file)
    assert prompt_file is not None, "one of both"
    if tokenizer is None:
        raise usage("--prompt-file needs a tokenizer: say --tokenizer DIR, or --model DIR")
    return tokenize(prompt_file, tokenizer)


def _wanted(
    node: Operator, where: Where, model: str | None, adapter: str | None, tenant: str | None, fields: tuple[str, ...]
) -> dict[str, str]:
    """The fields of an identity that were said, by name."""
    from tierkv.core.explain import FIELD_NAMES
    from tierkv_cli.prompts import usage

    wanted: dict[str, str] = {}
    if model is not None:
        wanted["weights"] = _weights(node, where, model)
    if adapter is not None:
        wanted["adapter"] = _adapter(where, adapter)
    if tenant is not None:
        wanted["salt"] = tenant
    for one in fields:
        name, equals, value = one.partition("=")
        if not equals or name not in FIELD_NAMES:
            raise usage(f"--field: {one!r} is no NAME=VALUE with one of {', '.join(FIELD_NAMES)}")
        wanted[name] = value
    return wanted


def _weights(node: Operator, where: Where, model: str) -> str:
    from tierkv.storage.manifest import fingerprint_model
    from tierkv_cli.fingerprint import remembered
    from tierkv_cli.progress import Meter
    from tierkv_cli.warmup import find_fingerprint

    if not Path(model).is_dir():
        return find_fingerprint(node.usage().rows, model)
    with remembered(where) as memory, Meter("hashing") as meter:
        return fingerprint_model(Path(model), memory, meter.show_bytes).fingerprint


def _adapter(where: Where, adapter: str) -> str:
    from tierkv.storage.manifest import fingerprint_adapter
    from tierkv_cli.fingerprint import remembered
    from tierkv_cli.progress import Meter

    if adapter in ("", "none"):
        return ""
    if not Path(adapter).is_dir():
        return adapter.lower()
    with remembered(where) as memory, Meter("hashing") as meter:
        return fingerprint_adapter(Path(adapter), memory, meter.show_bytes).fingerprint


# ---- a prompt


def _show_prompt(node: Operator, tokens: list[int], wanted: dict[str, str], *, as_json: bool) -> int:
    from tierkv.core.keys import pack_tokens
    from tierkv_cli.why_words import judge_prompt

    reply = node.explain(wanted=wanted)
    looks = _look(node, reply.namespaces, pack_tokens(tokens))
    status = node.status()
    verdict = judge_prompt(looks, len(tokens), status, reply.now)
    if as_json:
        _print(verdict, looks, {"prompt": {"tokens": len(tokens)}, "wanted": _shown(wanted)})
    else:
        _tell(verdict, f"the prompt has {len(tokens):,} tokens", status, reply.now)
    return 0


def _look(node: Operator, namespaces: tuple[Namespace, ...], tokens: bytes) -> list[Look]:
    """The prompt in each namespace, under the keys that it has there."""
    from tierkv.core.keys import chain_keys
    from tierkv_cli.why_words import Look

    looks = []
    for namespace in namespaces[:LOOKED_INTO]:
        keys = chain_keys(namespace.group, tokens, namespace.block_tokens)
        looks.append(Look(namespace, _trace(node, namespace, keys, tokens)))
    return looks


def _trace(node: Operator, namespace: Namespace, keys: bytes, tokens: bytes) -> Trace:
    from tierkv.core.explanation import Trace

    found = node.explain(of=namespace.group, keys=keys, tokens=tokens).trace if keys else None
    nothing = Trace(
        group=namespace.group,
        block_tokens=namespace.block_tokens,
        asked_blocks=0,
        cached_blocks=0,
        host_blocks=0,
        stretches=(),
    )
    return found or nothing


def _shown(wanted: dict[str, str]) -> dict[str, str]:
    from tierkv.core.explain import shown

    return {name: shown(name, value) for name, value in wanted.items()}


# ---- a request


def _show_request(node: Operator, request: str, *, as_json: bool) -> int:
    from tierkv_cli.output import printable
    from tierkv_cli.why_words import Look, judge_request

    reply = node.explain(request=request)
    if not reply.asked:
        click.echo(f"tierkv: no request {printable(request)!r} is remembered; {_memory(reply)}", err=True)
        return UNKNOWN
    asked = reply.asked[0]
    own = [namespace for namespace in reply.namespaces if namespace.group == asked.group]
    others = tuple(namespace for namespace in reply.namespaces if namespace.group != asked.group)
    # Its own keys were remembered; for the others they are made of its tokens, as far as these are known.
    looks = [Look(namespace, reply.trace) for namespace in own]
    looks += _look(node, others, reply.tokens) if reply.tokens else [Look(one, None) for one in others[:LOOKED_INTO]]
    status = node.status()
    verdict = judge_request(asked, looks, status, reply.now)
    if as_json:
        _print(verdict, looks, {"request": asked, "of_that_name": len(reply.asked)})
    else:
        _tell(verdict, _about_request(asked, len(reply.asked), reply.now), status, reply.now)
    return 0


def _about_request(asked: Asked, of_that_name: int, now: float) -> str:
    from tierkv_cli.output import ago, printable

    name = printable(asked.name) or asked.grant.hex()
    waited = asked.answered_at - asked.asked_at
    after = f", answered after {waited * 1000:.0f} ms" if waited > 0 else ""
    among = f"; the latest of {of_that_name} with such an id" if of_that_name > 1 else ""
    return (
        f"request {name} of {printable(asked.model_name) or asked.group.hex()[:12]}, asked {ago(asked.asked_at, now)}"
        f"{after}{among}"
    )


def _show_last(node: Operator, last: int, *, as_json: bool) -> int:
    from tierkv_cli.output import console, print_json

    reply = node.explain(last=last)
    if as_json:
        print_json({"misses": reply.asked, "remembered": reply.remembered, "remembered_since": reply.remembered_since})
        return 0
    screen = console()
    if reply.asked:
        screen.print(_misses_table(reply))
        screen.print("")
    else:
        screen.print("no request has missed anything")
    screen.print(_memory(reply))
    return 0


def _memory(reply: ExplainReply) -> str:
    from tierkv_cli.output import ago, count

    if not reply.remembered:
        return "the node remembers none yet"
    since = ago(reply.remembered_since, reply.now)
    return f"the node remembers {count(reply.remembered, 'request')}, the first of {since}"


# ---- for programs


def _print(verdict: Verdict, looks: list[Look], about: dict[str, object]) -> None:
    from tierkv_cli.output import plain, print_json

    namespaces = [plain(look.namespace) | {"trace": plain(look.trace)} for look in looks]
    told = {"cause": verdict.cause, "headline": verdict.headline, "details": verdict.details}
    print_json(told | about | {"namespaces": namespaces})


# ---- for people


def _tell(verdict: Verdict, about: str, status: StatusReply, now: float) -> None:
    from tierkv_cli.output import console

    screen = console()
    screen.print(f"{verdict.headline[0].upper()}{verdict.headline[1:]}.")
    screen.print("")
    screen.print(about)
    for part in _trace_view(verdict.about, status, now) if verdict.about is not None else ():
        screen.print(part)
    for detail in verdict.details:
        screen.print(f"- {detail}")
    if verdict.others:
        screen.print("")
        screen.print(_others_table(verdict.others, now))


def _trace_view(look: Look, status: StatusReply, now: float) -> Iterator[RenderableType]:
    from tierkv_cli.why_words import is_durable, short_name

    yield f"in {short_name(look.namespace)}, {look.namespace.block_tokens} tokens a block:"
    if look.trace is not None and (look.trace.stretches or look.trace.missing is not None):
        yield ""
        yield _stretches_table(look.trace, now, durable=is_durable(look.namespace, status))
    yield ""


def _stretches_table(trace: Trace, now: float, *, durable: bool) -> RenderableType:
    from tierkv_cli.output import ago, table
    from tierkv_cli.why_words import missing_in_short, nvme_in_words, tier_in_words

    shown = table("tokens", "where", "hits", "last used", "", numbers=("hits", "last used"))
    for stretch in trace.stretches:
        end = stretch.first_token + stretch.tokens
        note = "being read" if stretch.being_read else nvme_in_words(stretch) if durable else ""
        where = " and ".join(map(tier_in_words, stretch.tiers))
        shown.add_row(
            f"{stretch.first_token:,} to {end:,}", where, f"{stretch.hits:,}", ago(stretch.last_used, now), note
        )
    missing = trace.missing
    if missing is not None:
        shown.add_row(
            f"{missing.token:,} to {missing.token + missing.tokens:,}",
            "not cached",
            "",
            "",
            missing_in_short(missing, now),
        )
    return shown


def _others_table(looks: list[Look], now: float) -> RenderableType:
    from tierkv_cli.output import ago, table
    from tierkv_cli.why_words import differences, short_name

    shown = table(
        "other namespaces",
        "of this prompt",
        "in all",
        "last used",
        "differs in",
        numbers=("of this prompt", "in all", "last used"),
    )
    for look in looks:
        namespace = look.namespace
        has = "?" if look.trace is None else f"{look.cached_tokens:,}"
        shown.add_row(
            short_name(namespace), has, f"{namespace.tokens:,}", ago(namespace.last_used, now), differences(namespace)
        )
    return shown


def _misses_table(reply: ExplainReply) -> RenderableType:
    from tierkv_cli.output import ago, percent, printable, table

    shown = table(
        "asked", "request", "model", "tokens", "got", "", "why not more", numbers=("asked", "tokens", "got", "")
    )
    for asked in reply.asked:
        shown.add_row(
            ago(asked.asked_at, reply.now),
            printable(asked.name) or asked.grant.hex()[:12],
            printable(asked.model_name) or asked.group.hex()[:12],
            f"{asked.asked_tokens:,}",
            f"{asked.tokens:,}",
            percent(asked.tokens, asked.asked_tokens),
            _in_short(asked),
        )
    return shown


def _in_short(asked: Asked) -> str:
    """ "deadline; never stored from 1,024 on" """
    from tierkv_cli.why_words import ABSENCES

    parts = [asked.reason] if asked.tokens < asked.cached_tokens and asked.reason else []
    if asked.absence:
        parts.append(f"{ABSENCES[asked.absence]} from {asked.cached_tokens:,} on")
    return "; ".join(parts)
