"""One vLLM on one node: what was computed before comes from the node, and every answer is that of a vLLM without
tierkv, token for token (float32)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from e2e.engines.conftest import References
from e2e.engines.harness import Answer, VllmServer
from e2e.engines.questions import BURST, NEW_TOKENS, TURNS, reusable, shared, take_turn
from e2e.engines.store import Checked, Store
from e2e.harness import wait_until

BURSTS = [f"burst {number}" for number in range(BURST)]


def test_a_system_prompt_that_requests_share_is_computed_once(first: Checked, store: Store) -> None:
    assert first.ask_and_store("help 1").external == 0
    one, two = (first.references[name].prompt for name in ("help 1", "help 2"))
    first.server.reset_prefix_cache()
    assert first.ask_and_store("help 2").by_source == {"host": shared(one, two)}
    with store.hits() as hits:
        assert first.ask_again("help 1").by_source == {"host": reusable(one)}
    assert (hits.host, hits.nvme) == (reusable(one), 0)


def test_each_turn_of_a_chat_reuses_what_was_said_before(first: Checked, store: Store, references: References) -> None:
    answers: list[Answer] = []

    def take_again() -> None:
        first.server.reset_prefix_cache()
        take_turn(first.server, answers)

    for expected in references.chat:
        given_up = first.num_given_up()
        with first.server.counted(1) as tokens:
            answer = take_turn(first.server, answers)
        assert answer.tokens == expected.tokens
        if answers:
            assert tokens.by_source == {"host": shared(answers[-1].computed, answer.prompt)}
        else:
            assert tokens.external == 0
        store.note(first.server, answer)
        first.see_stored(given_up, take_again)
        first.server.reset_prefix_cache()
        answers.append(answer)
    assert len(answers) == len(TURNS)


def test_a_code_assistant_gets_its_files_from_the_node(first: Checked, store: Store) -> None:
    one, two = (first.references[name].prompt for name in ("code 1", "code 2"))
    assert first.ask_and_store("code 1").external == 0
    first.server.reset_prefix_cache()
    assert first.ask_and_store("code 2").by_source == {"host": shared(one, two)}
    assert first.ask_again("code 2").by_source == {"host": reusable(two)}


def test_an_adapter_shares_nothing_with_the_model_under_it(first: Checked, store: Store) -> None:
    tuned, untuned = (first.references[name] for name in ("tuned", "untuned"))
    assert tuned.prompt == untuned.prompt
    assert tuned.tokens != untuned.tokens, "the adapter changes nothing, then it proves nothing"
    assert first.ask_and_store("untuned").external == 0
    assert first.ask_adapter("tuned").external == 0
    for name in ("tuned", "untuned"):
        assert first.ask_again(name).by_source == {"host": reusable(tuned.prompt)}


def test_requests_that_are_aborted_among_eight_do_no_harm(first: Checked, store: Store) -> None:
    """Half of the clients go away: before the first token, after it, in the middle. Twice, first while what they asked
    for is computed, then while it is loaded."""
    for _ in range(2):
        first.server.reset_prefix_cache()
        for name, answer in burst(first.server, {name: first.references[name].prompt for name in BURSTS}).items():
            assert answer.tokens == first.references[name].tokens
        wait_until(first.server.is_idle, "vLLM has nothing to do")
        store.wait_idle()
    ask_all(first, store)
    for name in BURSTS:
        assert first.ask_again(name).by_source == {"host": reusable(first.references[name].prompt)}


def burst(server: VllmServer, prompts: dict[str, tuple[int, ...]]) -> dict[str, Answer]:
    """All at the same time; the answers of those that stayed to the end."""

    def client(number: int, prompt: tuple[int, ...]) -> Answer | None:
        with server.stream(prompt, new_tokens=NEW_TOKENS) as stream:
            if number % 2 == 0:
                return stream.rest()
            for _ in zip(range(number // 2), stream, strict=False):  # 0, 1, 2, 3 tokens
                pass
            return None

    with ThreadPoolExecutor(len(prompts)) as pool:
        clients = {name: pool.submit(client, number, prompt) for number, (name, prompt) in enumerate(prompts.items())}
        return {name: answer for name, future in clients.items() if (answer := future.result()) is not None}


def test_the_node_is_killed_while_eight_requests_wait_for_its_disk(first: Checked, store: Store) -> None:
    ask_all(first, store)
    store.restart()
    load_while_the_node_dies(first, store, disk=False)
    store.node.start()
    first.wait_connected()
    assert sum(first.ask_again(name).of("disk") for name in BURSTS) > 0, "it loads again"


def test_the_node_is_killed_while_eight_requests_load(first: Checked, store: Store) -> None:
    """At whatever moment that is."""
    ask_all(first, store)
    for _ in range(3):
        load_while_the_node_dies(first, store, disk=True)
        store.node.start()


def ask_all(first: Checked, store: Store) -> None:
    """And have all of it on disk."""

    def ask() -> None:
        first.server.reset_prefix_cache()
        for name in BURSTS:
            first.ask(name)

    given_up = first.num_given_up()
    ask()
    first.see_stored(given_up, ask)
    store.wait_flushed()


def load_while_the_node_dies(first: Checked, store: Store, *, disk: bool) -> None:
    """What is asked for is on disk, which answers or doesn't. Every answer must come, and be right."""
    first.wait_connected()
    store.wait_flushed()
    first.server.reset_prefix_cache()
    with ExitStack() as stack:
        if not disk:
            stack.enter_context(store.node.paused("storage"))
        pool = stack.enter_context(ThreadPoolExecutor(BURST))
        asked = store.num_acquires()
        answers = {
            name: pool.submit(first.server.complete, first.references[name].prompt, new_tokens=NEW_TOKENS)
            for name in BURSTS
        }
        wait_until(lambda: store.num_acquires() > asked, "vLLM asks the node for blocks")
        store.node.kill("supervisor")
        for name, answer in answers.items():
            assert answer.result().tokens == first.references[name].tokens
