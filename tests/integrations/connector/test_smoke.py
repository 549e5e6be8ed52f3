from tests.integrations.connector.kit import Engine

def test_a(engine: Engine) -> None:
    engine.introduce()
    engine.run("a", list(range(18)))
    assert engine.node.used_blocks == 4
    engine.poison()
    engine.add("b", list(range(18)))
    assert engine.wait_matched("b") == 16
    engine.allot("b", 16, first_page=10)
    engine.until(lambda: "b" in engine.ended_loads, "loaded")
    assert engine.is_right("b", 0, 4, first_page=10)
    assert not engine.failed_loads
    engine.scheduler.finished("b")
    engine.node.wait_until_nothing_is_held()
