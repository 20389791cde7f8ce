"""Random operations on the queue of the encode stage, with its invariants checked after each."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.encoding.queue import EncodeQueue
from scheduler.encoding.values import (
    Effect,
    EncodeConfig,
    EncodeInstance,
    EncodeReason,
    EncodeRequest,
    EndRequest,
    Medium,
    StartPass,
    StopMedium,
)

NUM_TOKENS = {"a": 10, "b": 200, "c": 200, "d": 3000}
MODELS = ("", "m", "n")
OUTCOMES = (EncodeReason.ENCODED, EncodeReason.REFUSED, EncodeReason.FAILED)


class Shell:
    """Performs effects and holds the queue to what it promises."""

    def __init__(self) -> None:
        self.queue = EncodeQueue(EncodeConfig(timeout_s=5.0, max_waiting=6))
        self.now_s = 0.0
        self.open: dict[str, int] = {}
        """Requests under way, and how many media each has."""
        self.running: dict[tuple[int, str], str] = {}
        """Media that run, by pass and identifier, and their instance."""
        self.passes: dict[int, EncodeInstance] = {}
        self.instances: dict[str, EncodeInstance] = {}
        self.num_requests = 0

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, EndRequest):
                assert len(effect.media) == self.open.pop(effect.key)
                assert all(one.node or not one.reason.is_there for one in effect.media)
            elif isinstance(effect, StopMedium):
                assert (effect.number, effect.identifier) in self.running
            else:
                self.start(effect)
        self.queue.check_invariants()

    def start(self, effect: StartPass) -> None:
        instance = self.instances[effect.instance]
        assert instance.healthy
        assert not effect.model or not instance.model or instance.model == effect.model
        names = [one.identifier for one in effect.media]
        assert 0 < len(names) == len(set(names))
        for name in names:
            self.running[effect.number, name] = effect.instance
        under_way = {number for number, _ in self.running if self.at(number) == effect.instance}
        assert len(under_way) <= max(instance.max_passes, 2)

    def at(self, number: int) -> str:
        return next(at for (found, _), at in self.running.items() if found == number)

    def submit(self, model: str, names: list[str]) -> None:
        self.num_requests += 1
        key = f"r{self.num_requests}"
        self.open[key] = len(names)
        media = tuple(Medium(name, NUM_TOKENS[name]) for name in names)
        request = EncodeRequest(key, media, model, frozenset({"n0"}))
        self.perform(self.queue.submit(request, self.now_s))

    def end_one(self, choice: int, reason: EncodeReason) -> None:
        if self.running:
            number, name = sorted(self.running)[choice % len(self.running)]
            del self.running[number, name]
            self.perform(self.queue.ended(number, name, reason, self.now_s))

    def withdraw(self, choice: int) -> None:
        if self.open:
            key = sorted(self.open)[choice % len(self.open)]
            del self.open[key]
            self.perform(self.queue.withdraw(key, self.now_s))

    def change(self, view: EncodeInstance) -> None:
        self.instances[view.name] = view
        self.perform(self.queue.instance_changed(view, self.now_s))

    def leave(self, name: str) -> None:
        self.instances.pop(name, None)
        self.running = {key: at for key, at in self.running.items() if at != name}
        self.perform(self.queue.instance_left(name, self.now_s))


names = st.sampled_from(("e0", "e1", "e2"))
views = st.builds(
    EncodeInstance,
    names,
    st.sampled_from(MODELS),
    st.sampled_from(("n0", "n1")),
    healthy=st.booleans(),
    decodes=st.booleans(),
    max_passes=st.integers(1, 2),
)
steps = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from(MODELS),
        st.lists(st.sampled_from(sorted(NUM_TOKENS)), max_size=4),
    ),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(OUTCOMES)),
    st.tuples(st.just("withdraw"), st.integers(0, 9)),
    st.tuples(st.just("change"), views),
    st.tuples(st.just("leave"), names),
    st.tuples(st.just("wait"), st.floats(0.0, 3.0)),
)


@settings(max_examples=200)
@given(st.lists(steps, max_size=60))
def test_every_request_ends_once_whatever_happens(ops: list[tuple[object, ...]]) -> None:
    shell = Shell()
    shell.change(EncodeInstance("e0", node="n0"))
    does = {
        "submit": shell.submit,
        "end": shell.end_one,
        "withdraw": shell.withdraw,
        "change": shell.change,
        "leave": shell.leave,
    }
    for name, *arguments in ops:
        if name == "wait":
            (seconds,) = arguments
            assert isinstance(seconds, float)
            shell.now_s += seconds
            shell.perform(shell.queue.tick(shell.now_s))
        else:
            does[str(name)](*arguments)  # type: ignore[operator]
    shell.now_s += 5.0
    shell.perform(shell.queue.tick(shell.now_s))
    assert not shell.open
    assert shell.queue.num_waiting == 0
