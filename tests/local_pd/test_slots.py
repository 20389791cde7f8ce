"""Which slots are held: until they are given back, or until their lease is over."""

from local_pd.slots import HeldSlots


def test_a_slot_is_held_until_it_is_given_back() -> None:
    slots = HeldSlots()
    slots.hold("a", "d0", 30.0, now_s=0.0)
    slots.hold("b", "d1", 30.0, now_s=0.0)
    assert (slots.num_held("d0", 1.0), slots.num_held("d2", 1.0)) == (1, 0)
    slots.drop("a")
    slots.drop("a")
    assert (slots.num_held("d0", 1.0), slots.num_held("d1", 1.0)) == (0, 1)


def test_a_lease_that_runs_out_gives_the_slot_back() -> None:
    slots = HeldSlots()
    slots.hold("a", "d0", 30.0, now_s=0.0)
    slots.renew("a", 30.0, now_s=20.0)
    slots.renew("b", 30.0, now_s=20.0)
    assert slots.num_held("d0", 49.0) == 1
    assert slots.num_held("d0", 50.0) == 0
    slots.renew("a", 30.0, now_s=51.0)
    assert slots.num_held("d0", 51.0) == 0


def test_slots_that_nobody_gave_back_do_not_pile_up() -> None:
    slots = HeldSlots()
    for number in range(3000):
        slots.hold(str(number), "d0", 1.0, now_s=float(number))
    assert len(slots) <= 256


def test_a_request_is_awaited_until_its_landing_has_ended() -> None:
    slots = HeldSlots()
    for name in "abc":
        slots.hold(name, "d0", 30.0, now_s=0.0)
    assert slots.num_awaited("d0", 0.0) == 3
    assert slots.landing_ended("a")
    assert not slots.landing_ended("a")
    assert not slots.landing_ended("unknown")
    assert slots.num_awaited("d0", 1.0) == 2
    slots.drop("a")
    slots.drop("b")
    assert slots.num_awaited("d0", 29.5) == 1
    assert slots.num_awaited("d0", 31.0) == 0
    slots.drop("c")
    assert slots.num_awaited("d0", 31.0) == 0
