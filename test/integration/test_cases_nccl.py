#!/usr/bin/python3
"""Public fault reports about NCCL (group C, C01 to C15): where each is shown to come out right.

The right value of a case is asserted by the tests that its row names; this file holds that they exist, so that none is lost when
a test is renamed or left out.
"""
import unittest

from rig import *  # noqa: F403

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
INTEGRATION, UNIT = "test/integration/test_", "test/unit/test_"
NODES = INTEGRATION + "nodes_nccl.py"
COMMS, SHRINK, BUFFERS, SWEEP = (f"test/standin/test_standin_{x}.c" for x in ("nccl", "nccl_shrink", "nccl_buffers", "sweep"))

# Case: what came out wrong, and (file, test) of what must come out.
CASES = {
    "C01": ("init never ends", [
        (COMMS, "a_member_that_never_comes_ends_it_at_the_deadline"),
        (NODES, "test_a_member_that_hangs_in_init_ends_it_at_the_deadline_by_name"),
        (NODES, "test_health_is_answered_while_members_are_waited_for"),
        (NODES, "test_a_data_plane_that_stands_still_in_init_is_named")]),
    "C02": ("one member fails inside init", [
        (NODES, "test_a_member_that_fails_in_init_ends_it_at_once"),
        (NODES, "test_each_of_a_nodes_ranks_is_asked_how_it_does"),
        (NODES, "test_an_id_that_cannot_be_made_is_told_and_the_next_refit_works")]),
    "C03": ("abort hangs", [
        (COMMS, "an_abort_that_hangs_is_told_by_the_watchdog"),
        (NODES, "test_an_abort_that_hangs_costs_that_data_plane_alone"),
        (NODES, "test_two_models_on_the_same_nodes_have_a_communicator_each"),
        (SWEEP, "every_call_that_hangs_costs_its_data_plane_alone")]),
    "C04": ("unique id used twice", [
        (COMMS, "a_killed_peer_is_silence_until_aborted_and_a_new_id_makes_a_new_communicator"),
        (NODES, "test_one_communicator_serves_all_refits_of_an_epoch")]),
    "C05": ("one GPU in two ranks", [
        (COMMS, "one_gpu_in_two_ranks_is_refused_before_nccl_is_asked")]),
    "C06": ("versions differ between nodes", [
        (NODES, "test_another_nccl_is_refused_by_both_versions"),
        (NODES, "test_another_cuda_is_refused_by_both_versions"),
        (COMMS, "an_nccl_that_is_too_old_is_refused_with_its_version"),
        (UNIT + "peer.c", "a_join_that_does_not_fit_is_refused_with_what_differs")]),  # our own protocol's number among it
    "C07": ("interface that is not there", [
        (INTEGRATION + "members.py", "test_what_this_machine_does_not_have"),
        (UNIT + "service_config.c", "an_interface_or_address_that_is_not_here_is_named_at_start"),
        (BUFFERS, "an_interface_or_address_that_is_not_there_is_named_with_those_that_are"),
        (NODES, "test_an_interface_that_is_not_there_is_named_at_the_start")]),
    "C08": ("wrong interface chosen", [
        (UNIT + "base_netaddr.c", "the_interface_that_others_reach_is_chosen"),
        (UNIT + "base_netaddr.c", "loopback_alone_will_do_for_one_node_and_not_for_two"),
        (UNIT + "peer_address.c", "an_interface_gives_its_routable_address_of_the_clusters_family"),
        (BUFFERS, "the_interface_of_the_data_address_is_nccls"),
        (BUFFERS, "a_list_of_interfaces_is_read_as_nccl_reads_it"),
        (NODES, "test_what_a_machine_has_of_its_own_may_differ")]),
    "C09": ("address families", [
        (UNIT + "peer_address.c", "addresses_of_both_families_are_read_and_ambiguous_ones_refused"),
        (UNIT + "base_netaddr.c", "what_can_be_read_in_two_ways_is_refused_with_both"),
        (UNIT + "peer.c", "a_join_that_does_not_fit_is_refused_with_what_differs"),
        (INTEGRATION + "members.py", "test_address_families")]),
    "C10": ("send/recv order and grouping", [
        (COMMS, "groups_in_an_order_that_does_not_match_hang_and_an_abort_ends_them"),
        (UNIT + "transport.c", "all_pairs_arrive_whatever_the_order_in_a_group"),  # on the stand-in with NCCL, too
        (UNIT + "transport.c", "a_group_that_names_no_peer_or_no_bytes_is_refused"),
        (UNIT + "plan_programs.c", "random_programs_land_every_element_and_never_wait_in_a_circle")]),
    "C11": ("sides disagree on the size", [
        (UNIT + "refit_member.c", "another_plan_than_the_coordinators_is_told_with_both_digests_before_anything_is_prepared"),
        (UNIT + "transport.c", "sides_that_disagree_on_the_size_both_fail")]),
    "C12": ("shrink and grow", [
        (SHRINK, "those_who_are_left_shrink_after_the_other_has_died"),
        (SHRINK, "an_nccl_that_refuses_to_shrink_makes_a_new_communicator"),
        (SHRINK, "one_that_fails_and_one_that_waits_meet_by_the_id"),
        (NODES, "test_it_is_off_unless_it_is_asked_for"),
        (NODES, "test_where_nccl_refuses_a_new_one_is_made_in_the_same_attempt_and_said"),
        (NODES, "test_a_new_member_makes_an_epoch_with_a_communicator_of_its_own")]),
    "C13": ("errors that are never reported", [
        (COMMS, "a_killed_peer_is_silence_until_aborted_and_a_new_id_makes_a_new_communicator"),
        (NODES, "test_a_member_that_is_killed_in_the_middle_ends_it_and_comes_back"),
        (NODES, "test_a_data_plane_that_is_killed_in_the_middle_is_replaced"),
        (NODES, "test_an_error_that_nobody_asked_for_ends_it"),
        (INTEGRATION + "cases_daemon.py", "test_a_killed_process_is_found_within_two_seconds")]),
    "C14": ("fixed port, many cycles", [
        (COMMS, "two_hundred_communicators_come_and_go"),
        (BUFFERS, "a_fixed_id_is_refused_at_the_start")]),
    "C15": ("environment differs", [
        (NODES, "test_a_transport_switch_of_nccl_that_differs_is_refused_by_name"),
        (NODES, "test_what_a_machine_has_of_its_own_may_differ")]),
}


class Table(unittest.TestCase):
    def test_every_case_names_tests_that_run(self):
        self.assertEqual(list(CASES), [f"C{i:02}" for i in range(1, 16)])
        for case, (what, tests) in CASES.items():
            self.assertTrue(tests, f"{case} {what}: no test")
            for file, name in tests:
                with self.subTest(case=case, test=name):
                    text = (ROOT / file).read_text()
                    # A test of Check runs where the program's list has it.
                    here = rf"def {name}\(self" if file.endswith(".py") else rf"START_TEST\(\s*{name}\)(?s:.)*\bX\(\s*{name}\)"
                    self.assertRegex(text, here, f"{case} {what}: {file} has no {name} that runs")


if __name__ == "__main__":
    main()
