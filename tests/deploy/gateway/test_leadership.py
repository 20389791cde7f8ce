"""Who acts on the long term: by a lease, and without anybody to ask."""

from deploy.gateway.scheduling.leadership import Leadership


def test_the_only_gateway_leads() -> None:
    alone = Leadership()
    assert alone.leads(0.0)
    assert alone.leads(1e9)
    assert alone.token == 0


def test_a_lease_ends_by_itself() -> None:
    shared = Leadership(is_shared=True)
    assert not shared.leads(0.0)
    assert "no gateway leads" in shared.why_not
    shared.granted(7, 5.0, "me")
    assert shared.leads(4.9)
    # As after a pause of the whole process: nothing was heard, so the lease may be another's.
    assert not shared.leads(5.1)
    shared.granted(7, 9.0, "me")
    assert shared.leads(5.1)


def test_a_leader_that_is_cut_off_goes_on_and_others_do_not_begin() -> None:
    leader, other = Leadership(is_shared=True), Leadership(is_shared=True)
    leader.granted(7, 5.0, "me")
    other.taken("me")
    assert other.why_not == "the gateway me leads the region and converts instances"
    for gateway in (leader, other):
        gateway.cut_off()
    assert leader.leads(100.0)
    assert not other.leads(100.0)
    leader.taken("other")
    other.granted(8, 105.0, "other")
    assert not leader.leads(101.0)
    leader.cut_off()
    assert not leader.leads(102.0)
    assert (leader.token, other.token) == (7, 8)
