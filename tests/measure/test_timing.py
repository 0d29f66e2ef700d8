from kvplan.measure.device import FakeDevice
from kvplan.measure.timing import ROUNDS_MIN, Sampling, sample_interleaved


class Recorder:
    def __init__(self, device: FakeDevice, seconds: dict[str, float]) -> None:
        self.device = device
        self.seconds = seconds
        self.order: list[str] = []

    def call(self, name: str) -> None:
        self.order.append(name)
        self.device.pass_time(self.seconds[name])


def run(seconds: dict[str, float], sampling: Sampling) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    recorder = Recorder(FakeDevice(), seconds)

    def bind(name: str) -> object:
        return lambda: recorder.call(name)

    return sample_interleaved(recorder.device, {name: bind(name) for name in seconds}, sampling), recorder.order  # type: ignore[misc]


def test_every_sample_is_the_seconds_of_one_call() -> None:
    found, _ = run({"a": 0.5, "b": 0.25}, Sampling(samples=4))

    assert found == {"a": (0.5,) * 4, "b": (0.25,) * 4}


def test_rounds_take_one_sample_of_each_in_one_order() -> None:
    _, order = run({"a": 1.0, "b": 1.0, "c": 1.0}, Sampling(samples=3, warmups=1))

    assert order == ["a", "b", "c"] * 4


def test_a_short_call_is_repeated_inside_a_sample_until_the_clock_can_tell() -> None:
    found, order = run({"a": 0.0001}, Sampling(samples=2, warmups=1, sample_s_min=0.001))

    assert len(order) == 1 + 2 * 10
    assert found["a"] == (0.0001,) * 2 or all(abs(sample - 0.0001) < 1e-12 for sample in found["a"])


def test_a_call_that_takes_no_time_is_called_once_a_sample() -> None:
    _, order = run({"a": 0.0}, Sampling(samples=2, warmups=1))

    assert len(order) == 3


def test_the_budget_ends_sampling_after_whole_rounds_but_never_before_the_third() -> None:
    spent, _ = run({"a": 1.0, "b": 1.0}, Sampling(samples=50, budget_s=9.0))
    tight, _ = run({"a": 1.0, "b": 1.0}, Sampling(samples=50, budget_s=0.1))

    assert [len(samples) for samples in spent.values()] == [5, 5]
    assert [len(samples) for samples in tight.values()] == [ROUNDS_MIN, ROUNDS_MIN]


def test_warm_ups_are_no_samples() -> None:
    found, order = run({"a": 1.0}, Sampling(samples=1, warmups=3))

    assert len(order) == 4
    assert len(found["a"]) == 1
