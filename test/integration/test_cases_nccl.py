#!/usr/bin/python3
"""Public fault reports about NCCL (group C, C01 to C15) and about memory of GPUs (C16 to C25, B22 to B24, B29): where each is
shown to come out right.

The right value of a case is asserted by the tests that its row names; this file holds that they exist, so that none is lost when
a test is renamed or left out.
"""
import unittest

from rig import *  # noqa: F403

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
INTEGRATION, UNIT = "test/integration/test_", "test/unit/test_"
NODES = INTEGRATION + "nodes_nccl.py"
COMMS, SHRINK, BUFFERS, SWEEP, HANDLES, STRICT = (f"test/standin/test_standin_{x}.c" for x in (
    "nccl", "nccl_shrink", "nccl_buffers", "sweep", "memory", "strict"))
DEVICE, EXPORT, COLOCATED = (f"test/gpu/test_gpu_{x}.c" for x in ("device", "export", "refit"))
MEMORY, LIBRARY, SLEEP, SETTINGS = (f"{INTEGRATION}{x}.py" for x in ("device_memory", "device_library", "sleep", "device_settings"))

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
    "C16": ("handle opened by its own exporter", [
        (EXPORT, "what_this_process_has_exported_is_used_where_it_lies"),
        (COLOCATED, "a_client_in_the_data_planes_own_process_is_read_where_its_memory_lies"),
        (UNIT + "base_process.c", "a_process_is_known_by_namespace_pid_and_start")]),
    "C17": ("memory that can't be exported the old way", [
        (EXPORT, "a_pools_memory_and_host_memory_are_refused_with_their_kind"),
        (EXPORT, "a_part_of_a_vmm_allocation_is_handed_over_by_its_pointer"),
        (LIBRARY, "test_what_is_no_gpu_allocation_is_refused_and_an_export_by_hand_is_taken"),
        (MEMORY, "test_case_c17_a_descriptor_that_is_no_vmm_allocation_is_refused")]),
    "C18": ("pointer inside an allocation", [
        (MEMORY, "test_case_c18_a_range_that_leaves_its_allocation_is_refused"),
        (EXPORT, "a_part_of_an_allocation_is_handed_over_by_its_pointer")]),
    "C19": ("same handle opened twice", [
        (DEVICE, "a_workers_gpu_memory_is_read_and_written_through_one_open_handle"),
        (MEMORY, "test_case_c19_c20_one_open_handle_closed_before_the_last_answer")]),
    "C20": ("close order", [
        (MEMORY, "test_case_c19_c20_one_open_handle_closed_before_the_last_answer"),
        (STRICT, "a_thread_that_never_used_cuda_closes_on_the_device_that_the_memory_is_on")]),
    "C21": ("stale mapping after free and realloc at the same address", [
        (HANDLES, "another_generation_of_a_handle_is_opened_anew"),
        (MEMORY, "test_case_b24_c21_versions_in_memory_that_is_freed_and_allocated_again_each_time")]),
    "C22": ("dead exporter", [
        (MEMORY, "test_case_c22_memory_of_a_killed_client_is_let_go"),
        (DEVICE, "a_handle_of_a_dead_worker_or_of_this_process_is_refused")]),
    "C23": ("address space", [
        (HANDLES, "ten_thousand_imports_leave_no_address_space_and_over_a_thousand_open_ones_are_refused")]),
    "C24": ("pid namespaces and containers", [
        (MEMORY, "test_case_c24_a_client_of_another_pid_namespace_is_told_why"),
        (MEMORY, "test_case_c24_two_clients_of_equal_pid_in_two_namespaces_are_two"),
        (MEMORY, "test_case_c24_a_client_that_the_daemon_can_not_see_is_told_why_and_vmm_memory_is_taken"),
        (UNIT + "base_process.c", "a_process_of_another_pid_namespace_is_seen_to_be_of_another")]),
    "C25": ("device names", [
        (DEVICE, "a_gpu_is_found_by_index_and_by_uuid_in_any_case"),
        (MEMORY, "test_case_c25_devices_are_known_by_uuid_and_another_ones_memory_is_refused"),
        (SETTINGS, "test_case_c25_devices_are_the_gpus_that_are_named_in_that_order")]),
    "B22": ("ring of streams", [
        (UNIT + "device.c", "an_event_orders_two_streams_under_delays"),  # on the stand-in, too
        (UNIT + "device.c", "a_missing_dependency_shows_under_delays"),
        (UNIT + "exec.c", "every_element_lands_under_delays_and_poison")]),
    "B23": ("double memory", [
        (MEMORY, "test_case_b23_the_daemon_adds_its_ring_and_no_second_copy"),
        (MEMORY, "test_case_b23_64_mib_of_weights_take_no_more_of_the_daemon_than_its_staging")]),
    "B24": ("IPC memory is not given back", [
        (MEMORY, "test_case_b24_c21_versions_in_memory_that_is_freed_and_allocated_again_each_time")]),
    "B29": ("update into unmapped memory", [
        (SLEEP, "test_case_b29_a_transfer_to_who_sleeps_is_refused_and_goes_to_its_new_memory_once_it_wakes"),
        (MEMORY, "test_case_b29_memory_that_sleeps_is_no_place_to_write_to_until_it_wakes")]),
}


class Table(unittest.TestCase):
    def test_every_case_names_tests_that_run(self):
        self.assertEqual(list(CASES), [f"C{i:02}" for i in range(1, 26)] + ["B22", "B23", "B24", "B29"])
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
