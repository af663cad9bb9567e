# reshard. `make help` lists the targets. Every folder of daemon/ becomes one archive; what a folder may
# use stands in FLOORS below, which scripts/check-floors reads too.

BUILD ?= build
ifeq ($(origin CC),default)
CC := gcc
endif
# CUDA=1: kernels/*.cu, device_cuda and transport_nccl are compiled and linked too (default: where nvcc and the CUDA runtime are
# found). Such a build starts without a driver; NCCL, the driver library and NVML are loaded at run time.
CUDA_HOME ?= /usr/local/cuda
CUDA ?= $(if $(and $(wildcard $(CUDA_HOME)/bin/nvcc),$(wildcard $(CUDA_HOME)/lib64/libcudart.so)),1,0)
ifeq ($(CUDA),1)
ifeq ($(wildcard $(CUDA_HOME)/bin/nvcc),)
$(error CUDA=1, but there is no $(CUDA_HOME)/bin/nvcc: set CUDA_HOME, or build with CUDA=0)
endif
endif
SANITIZE ?=
LABEL ?=
# A recipe says what it makes; V=1 says how.
V ?= 0
Q = $(if $(filter 1,$(V)),,@echo "  $(patsubst $(BUILD)/%,%,$@)";)
comma := ,

# folder: floor, folders it may include (besides base). Lower floors only.
# floor-begin
FLOOR_base      := 0
FLOOR_kernels   := 0
FLOOR_layout    := 1
FLOOR_topology  := 1
FLOOR_ledger    := 1
FLOOR_device    := 1
FLOOR_rpc       := 1
FLOOR_plan      := 2
FLOOR_memory    := 2
FLOOR_transport := 2
FLOOR_refit     := 3
FLOOR_exec      := 4
FLOOR_peer      := 5
FLOOR_service   := 6
FLOOR_client    := 7
USES_base       :=
USES_kernels    :=
USES_layout     :=
USES_topology   :=
USES_ledger     :=
USES_device     := kernels
USES_rpc        :=
USES_plan       := layout topology
USES_memory     := device kernels layout
USES_transport  := device kernels
USES_refit      := layout ledger
USES_exec       := plan memory transport device kernels layout topology
USES_peer       := exec refit plan layout topology ledger rpc
USES_service    := peer exec refit plan layout topology ledger rpc memory
USES_client     := layout rpc
# floor-end

FOLDERS := kernels layout topology ledger device rpc plan memory transport refit exec peer service client
LIBS_base      := -lpthread
LIBS_kernels   := -lm
LIBS_layout    := -ljansson -lxxhash
LIBS_topology  := -ljansson
LIBS_ledger    := -lsqlite3
LIBS_rpc       := -lgrpc -lgpr -luv -lprotobuf-c -lcrypto
LIBS_plan      := -ljansson -lxxhash
LIBS_peer      := -luv -lprotobuf-c
LIBS_service   := -luv -lprotobuf-c -linih

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wvla -Werror -Wno-format-truncation
OPT      ?= -O2 -g
CFLAGS_ALL = -std=c17 -D_GNU_SOURCE $(OPT) $(WARNINGS) -fvisibility=hidden -fPIC -pthread -MMD -MP \
             -Idaemon -I. -I$(BUILD)/gen $(SANITIZE) $(CFLAGS)
LDFLAGS_ALL = -pthread $(SANITIZE) $(LDFLAGS)

.DEFAULT_GOAL := all
.PHONY: all check check-libc check-fuzz check-unit check-sim check-integration check-asan check-tsan check-floors lint format \
        demo bench fuzz install clean help deps
.SECONDARY:

# The library part of client/: all but the programs.
CLIENT_SRC := $(filter-out client/reshardctl.c client/cmd.c client/ctl_%.c client/cmd_%.c client/demo_%.c,$(wildcard client/*.c))

# Changes with CUDA=, so that archives made with the other one are made again.
CUDA_STAMP := $(BUILD)/cuda-$(CUDA)
$(CUDA_STAMP):
	@mkdir -p $(@D); rm -f $(BUILD)/cuda-[01]; touch $@
CUDA_ONLY := $(wildcard daemon/device/device_cuda*.c) daemon/transport/transport_nccl.c $(wildcard daemon/transport/nccl_*.c)
RS_CUDA_OBJ := $(addprefix $(BUILD)/obj/,daemon/device/device.o daemon/exec/hello.o daemon/exec/data_plane.o daemon/exec/links.o daemon/exec/ring.o daemon/exec/pairs.o daemon/transport/transport.o test/unit/test_transport.o)
ifeq ($(CUDA),1)
CUDA_LIBS := -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -Wl,--push-state,--as-needed -lcudart -Wl,--pop-state
LIBS_kernels += $(CUDA_LIBS)
LIBS_transport += -ldl
LIBS_device += -ldl
$(patsubst %.c,$(BUILD)/obj/%.o,$(CUDA_ONLY)): CFLAGS_ALL += -isystem $(CUDA_HOME)/include
$(RS_CUDA_OBJ): CFLAGS_ALL += -DRS_CUDA
endif
$(RS_CUDA_OBJ): $(CUDA_STAMP)

src_of  = $(filter-out $(if $(filter 1,$(CUDA)),,$(CUDA_ONLY)),$(wildcard daemon/$(1)/*.c)) $(if $(filter kernels,$(1)),$(wildcard kernels/*.c)) \
          $(if $(filter client,$(1)),$(CLIENT_SRC))
cu_of   = $(if $(filter 1,$(CUDA)),$(if $(filter kernels,$(1)),$(wildcard kernels/*.cu)))
obj_of  = $(patsubst %.c,$(BUILD)/obj/%.o,$(call src_of,$(1))) $(patsubst %.cu,$(CU_BUILD)/obj/%.cu.o,$(call cu_of,$(1)))
lib_of  = $(if $(call src_of,$(1)),$(BUILD)/lib/lib$(1).a)
# A folder and all that it may use, transitively.
closure = $(sort $(1) base $(foreach u,$(USES_$(1)),$(call closure,$(u))))
libs    = $(foreach f,$(call closure,$(1)),$(call lib_of,$(f)))
ldlibs  = $(foreach f,$(call closure,$(1)),$(LIBS_$(f)))

# --- generated code -------------------------------------------------------------------------------
PROTOS  := $(wildcard proto/*.proto)
GEN     := $(patsubst proto/%.proto,$(BUILD)/gen/%.pb-c.c,$(PROTOS))
PB_HEADERS := $(GEN:.c=.h)
GEN_OBJ := $(patsubst $(BUILD)/gen/%.pb-c.c,$(BUILD)/obj/gen/%.pb-c.o,$(GEN))

$(BUILD)/gen/%.pb-c.c: proto/%.proto
	@mkdir -p $(@D)
	$(Q)protoc-c --c_out=$(BUILD)/gen --proto_path=proto $<
	@test -s $@ && test -s $(@:.c=.h)
$(BUILD)/gen/%.pb-c.h: $(BUILD)/gen/%.pb-c.c ;
$(BUILD)/gen/reshard.fds: $(PROTOS)
	@mkdir -p $(@D)
	$(Q)protoc --include_imports --descriptor_set_out=$@ --proto_path=proto $(PROTOS)
$(BUILD)/obj/gen/%.pb-c.o: $(BUILD)/gen/%.pb-c.c | $(PB_HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_ALL) -c $< -o $@
$(BUILD)/lib/libproto.a: $(GEN_OBJ)
	@mkdir -p $(@D)
	@rm -f $@
	$(Q)ar rcs $@ $^

# --- objects and archives -------------------------------------------------------------------------
$(BUILD)/obj/%.o: %.c | $(PB_HEADERS)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS_ALL) -c $< -o $@

# C launchers link from plain gcc: no exceptions, no guarded statics.
# The compiler's report on registers and spills is kept beside the object: check-kernels reads it. Sanitized builds take the
# same objects (CU_BUILD): nothing in them depends on it, and compiling takes a minute.
CU_BUILD ?= $(BUILD)
GENCODE := $(foreach a,80 90 100,-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_100,code=compute_100
$(CU_BUILD)/obj/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(Q)$(CUDA_HOME)/bin/nvcc -std=c++17 -O2 -Xptxas -v -Xcompiler -fPIC,-fno-exceptions,-fno-threadsafe-statics $(GENCODE) \
	    -Idaemon -I. -MMD -MP -MF $(@:.o=.d) -c $< -o $@ >$(@:.o=.ptxas) 2>&1 || { cat $(@:.o=.ptxas) >&2; rm -f $@; false; }

define folder_rule
$$(BUILD)/lib/lib$(1).a: $(call obj_of,$(1)) $$(CUDA_STAMP)
	@mkdir -p $$(@D)
	@rm -f $$@
	$$(Q)ar rcs $$@ $$(filter %.o,$$^)
endef
$(foreach f,base $(FOLDERS),$(if $(call src_of,$(f)),$(eval $(call folder_rule,$(f)))))

# --- programs -------------------------------------------------------------------------------------
-include Makefile.programs
-include client/client.mk

# --- unit tests: test/unit/test_FOLDER[_SUBJECT].c links FOLDER and what it may use ----------------
# UNIT_ONLY: names, for some of them.
UNIT := $(patsubst test/unit/%.c,$(BUILD)/test/%,$(wildcard test/unit/test_*.c))
UNIT := $(if $(UNIT_ONLY),$(filter $(addprefix $(BUILD)/test/,$(UNIT_ONLY)),$(UNIT)),$(UNIT))
folder_of = $(firstword $(subst _, ,$(patsubst test_%,%,$(notdir $(1)))))

define unit_rule
$(1): $(BUILD)/obj/test/unit/$(notdir $(1)).o $(call libs,$(call folder_of,$(1))) $(BUILD)/lib/libproto.a
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(LDFLAGS_ALL) -o $$@ $$< -Wl,--start-group $(call libs,$(call folder_of,$(1))) \
	    $(BUILD)/lib/libproto.a -Wl,--end-group $(call ldlibs,$(call folder_of,$(1))) \
	    -lprotobuf-c $$(shell pkg-config --libs check)
endef
$(foreach t,$(UNIT),$(eval $(call unit_rule,$(t))))

# --- the stand-in for a GPU: libraries with the sonames of CUDA, NVML and NCCL that run on the CPU (test/standin/standin.h) ----
# $(BUILD)/standin/standin_X runs $(BUILD)/test/test_X on it: the same program, another library path. Without nvcc each counts
# as skipped.
STANDIN := $(BUILD)/standin
# test/gpu/test_*.c also run on a GPU (scripts/gpu-check), test/standin/test_*.c need what only the stand-in can do.
STANDIN_SRC := $(wildcard test/gpu/test_*.c test/standin/test_*.c)
STANDIN_TESTS := device exec_scaled transport $(patsubst test_%.c,%,$(notdir $(STANDIN_SRC)))
ifeq ($(CUDA),1)
STANDIN_CFLAGS = $(filter-out -MMD -MP -Wpedantic,$(CFLAGS_ALL)) -isystem $(CUDA_HOME)/include
STANDIN_RT := $(wildcard test/standin/*.h kernels/*.h) $(wildcard test/standin/cudart_*.c) test/standin/common.c kernels/kernels_task.c \
    kernels/kernels_quantise_task.c daemon/base/err.c
STANDIN_LIBS := $(addprefix $(STANDIN)/,libnvtx-ranges.so libcudart.so.13 libcuda.so.1 libnvidia-ml.so.1 libnccl.so.2)
$(STANDIN)/libcudart.so.13: $(STANDIN_RT) test/standin/cudart.map
	@mkdir -p $(@D)
	$(Q)$(CC) $(STANDIN_CFLAGS) $(LDFLAGS_ALL) -shared -Wl,-soname,$(@F) -Wl,--version-script=test/standin/cudart.map -o $@ \
	    $(filter %.c,$(STANDIN_RT))
standin_other = $(CC) $(STANDIN_CFLAGS) $(LDFLAGS_ALL) -shared -Wl,-soname,$(@F) -o $@ $^
$(STANDIN)/libcuda.so.1: test/standin/driver.c $(STANDIN)/libcudart.so.13
	$(Q)$(standin_other)
$(STANDIN)/libnvidia-ml.so.1: test/standin/nvml.c $(STANDIN)/libcudart.so.13
	$(Q)$(standin_other)
$(STANDIN)/libnccl.so.2: test/standin/nccl.c test/standin/nccl_memory.c $(STANDIN)/libcudart.so.13
	$(Q)$(standin_other)
$(patsubst %.c,$(BUILD)/obj/%.o,$(STANDIN_SRC)): CFLAGS_ALL += -isystem $(CUDA_HOME)/include -DRS_CUDA
# A tool for NVTX that writes ranges down.
$(STANDIN)/libnvtx-ranges.so: test/standin/nvtx.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(filter-out -Wconversion,$(STANDIN_CFLAGS)) $(LDFLAGS_ALL) -shared -o $@ $<
define standin_rule
$(BUILD)/test/$(basename $(notdir $(1))): $(BUILD)/obj/$(1:.c=.o) $(call libs,exec)
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(LDFLAGS_ALL) -o $$@ $$< -Wl,--start-group $(call libs,exec) -Wl,--end-group $(call ldlibs,exec) \
	    -L$(CUDA_HOME)/lib64/stubs -Wl,--push-state,--as-needed -lcuda -Wl,--pop-state $$(shell pkg-config --libs check)
endef
$(foreach t,$(STANDIN_SRC),$(eval $(call standin_rule,$(t))))
$(STANDIN)/standin_%: $(BUILD)/test/test_% $(STANDIN_LIBS)
	@mkdir -p $(@D)
	$(Q)printf '#!/bin/sh\nLD_LIBRARY_PATH=%s TEST_DEVICE=cuda exec %s "$$@"\n' $(abspath $(STANDIN)) $(abspath $<) >$@ && chmod +x $@
else
$(STANDIN)/standin_%:
	@mkdir -p $(@D)
	@printf '#!/bin/sh\necho "no nvcc: not run on the stand-in"; echo "0 passed, 0 failed, 1 skipped"\n' >$@ && chmod +x $@
endif
# The daemon itself on it: all integration tests that apply (test/integration/backends.py says which) and crash tests, with
# one seed of the delays (another: STANDIN_SEED=7), workers' memory of each kind (SEGMENTS=ipc for one).
# STANDIN_FILES="test_refit.py …": these files only, and no crash tests.
.PHONY: check-standin
check-standin: export RESHARD_BUILD := $(abspath $(BUILD))
check-standin: export RESHARD_SLOW := $(if $(SANITIZE),4,1)
check-standin: export RESHARD_BACKEND := standin
check-standin: export RESHARD_SEGMENTS := $(or $(SEGMENTS),mixed)
# Python can't load sanitized libraries; those of a plain build are the same to a client (CU_BUILD has them).
check-standin: export RESHARD_CLIENT_STANDIN := $(if $(SANITIZE),$(abspath $(CU_BUILD)/standin))
STANDIN_RUN = scripts/run-tests --tally $(TALLY) --log $(BUILD)/log/standin$(1) --label "$(LABEL)stand-in $(2)" --timeout $(RUN_S)
ifeq ($(CUDA),1)
check-standin: $(BUILD)/reshardd $(BUILD)/reshardctl $(BUILD)/demo_worker $(BUILD)/py/reshard_pb2_grpc.py $(STANDIN_LIBS) \
    $(BUILD)/bench/bench_plan_paper $(STANDIN)/libreshard $(if $(SANITIZE),standin-client)
	@export STANDIN_SEED=$${STANDIN_SEED:-1}; \
	files=$$(test/integration/backends.py list) || exit 1; failed=0; \
	files="$(or $(addprefix test/integration/,$(STANDIN_FILES)),$$files)"; \
	echo "stand-in: STANDIN_SEED=$$STANDIN_SEED, segments $$RESHARD_SEGMENTS"; \
	$(call STANDIN_RUN) -- $(STANDIN)/libreshard $$(printf ' -- %s' $$files) || failed=1; \
	[ -z "$(STANDIN_FILES)" ] || exit $$failed; \
	$(call STANDIN_RUN) -- scripts/faults --short --json $(BUILD)/faults-standin.json || failed=1; \
	$(call STANDIN_RUN,/nodes,3 nodes ) -- scripts/faults --nodes 3 --short --only 'data plane,stop node,point exec,point apply' --json $(BUILD)/faults-standin-nodes.json || failed=1; \
	exit $$failed
.PHONY: standin-client
standin-client:
	@$(MAKE) --no-print-directory SANITIZE= OPT="-O2 -g" BUILD=$(CU_BUILD) $(patsubst $(BUILD)/%,$(CU_BUILD)/%,$(STANDIN_LIBS)) $(CU_BUILD)/libreshard.so
$(STANDIN)/libreshard: $(BUILD)/test/integration/test_libreshard
	$(Q)printf '#!/bin/sh\nexec %s run %s\n' $(abspath test/integration/backends.py) $(abspath $<) >$@ && chmod +x $@
else
check-standin:
	@n=$$(test/integration/backends.py count) || exit 1; \
	echo "skipped: no nvcc: $$n files of integration tests, the library's and the crash tests are not run on the stand-in"; \
	echo "0 0 $$((n + 3))" >>$(TALLY)
endif
# The compiler's report on the kernels: a spill is a failure.
.PHONY: check-kernels
PTXAS := $(patsubst %.o,%.ptxas,$(call obj_of,kernels))
PTXAS := $(filter %.cu.ptxas,$(PTXAS))
check-kernels: $(PTXAS:.ptxas=.o)
ifeq ($(CUDA),1)
	@scripts/run-tests --tally $(TALLY) --log $(BUILD)/log --label "$(LABEL)" -- scripts/check-kernels --json $(BUILD)/kernels.json $(PTXAS) -- scripts/gpu-check --syntax
else
	@echo "no nvcc: GPU kernels are not compiled"; echo "0 0 1" >>$(TALLY)
endif
STANDIN_PROGRAMS := $(addprefix $(STANDIN)/standin_,$(STANDIN_TESTS))

# --- benchmarks and fuzzers: test/bench/bench_FOLDER.c, test/fuzz/fuzz_SUBJECT.c ---------------------
# A benchmark links as a unit test of its folder does. A fuzzer is clang's libFuzzer with ASan and UBSan; its folder is
# named in FUZZ_SUBJECT, its corpus is test/fuzz/corpus/SUBJECT.
BENCH := $(patsubst test/bench/%.c,$(BUILD)/bench/%,$(wildcard test/bench/bench_*.c))
bench_folder = $(firstword $(subst _, ,$(patsubst bench_%,%,$(notdir $(1)))))
define bench_rule
$(1): $(BUILD)/obj/test/bench/$(notdir $(1)).o $(call libs,$(call bench_folder,$(1))) $(BUILD)/lib/libproto.a
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(LDFLAGS_ALL) -o $$@ $$< -Wl,--start-group $(call libs,$(call bench_folder,$(1))) \
	    $(BUILD)/lib/libproto.a -Wl,--end-group $(call ldlibs,$(call bench_folder,$(1))) -lm
endef
$(foreach t,$(BENCH),$(eval $(call bench_rule,$(t))))
# Preloaded into a daemon under measurement.
$(BUILD)/bench/fsync_clock.so: $(BUILD)/obj/test/bench/fsync_clock.o
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -shared -o $@ $< -ldl

# Every row of the table of figures; ROWS="plan_cold overlap" for some. Result: $(BUILD)/bench.json.
bench: deps
	@$(MAKE) --no-print-directory -j2 BUILD=$(BUILD) $(RESHARDD) $(BUILD)/reshardctl $(BUILD)/demo_worker $(BENCH) $(BUILD)/bench/fsync_clock.so $(PY_STUBS)
	@scripts/bench --build $(BUILD) $(ROWS)
	@$(if $(PTXAS),echo "GPU kernels as compiled:"; scripts/check-kernels --json $(BUILD)/kernels.json $(PTXAS),echo "GPU kernels: no nvcc here, so there is no report of the compiler")

FUZZ_layout_json := layout
FUZZ_topology    := topology
FUZZ_binding     := memory
FUZZ_netaddr     := base
FUZZ_peer        := peer
FUZZ_program     := plan
FUZZ_request     := service
FUZZ_rpc         := rpc
FUZZ_tcp         := transport
FUZZ_S ?= 60
FUZZERS := $(patsubst test/fuzz/fuzz_%.c,$(BUILD)/fuzz/fuzz_%,$(wildcard test/fuzz/fuzz_*.c))
FUZZ_FLAGS := -std=c17 -D_GNU_SOURCE -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined
FUZZ_CLOSURE = $(call closure,$(FUZZ_$(1)))
# Without CUDA: nothing there decodes bytes from outside.
fuzz_objects = $(patsubst %.c,$(BUILD)/fuzz/obj/%.o,$(filter-out $(CUDA_ONLY),$(foreach f,$(call FUZZ_CLOSURE,$(1)),$(call src_of,$(f))))) \
    $(patsubst $(BUILD)/%.c,$(BUILD)/fuzz/obj/%.o,$(GEN))
$(BUILD)/fuzz/obj/%.o: %.c | $(PB_HEADERS)
	@mkdir -p $(@D)
	$(Q)clang $(FUZZ_FLAGS) -MMD -MP -Idaemon -I. -I$(BUILD)/gen -c $< -o $@
$(BUILD)/fuzz/obj/gen/%.o: $(BUILD)/gen/%.c | $(PB_HEADERS)
	@mkdir -p $(@D)
	$(Q)clang $(FUZZ_FLAGS) -I$(BUILD)/gen -c $< -o $@
define fuzz_rule
$(BUILD)/fuzz/fuzz_$(1): $(BUILD)/fuzz/obj/test/fuzz/fuzz_$(1).o $(call fuzz_objects,$(1))
	@mkdir -p $$(@D)
	$(Q)clang $(FUZZ_FLAGS) -o $$@ $$^ $(foreach f,$(call FUZZ_CLOSURE,$(1)),$(LIBS_$(f))) -lprotobuf-c -lpthread
endef
$(foreach f,$(patsubst test/fuzz/fuzz_%.c,%,$(wildcard test/fuzz/fuzz_*.c)),$(eval $(call fuzz_rule,$(f))))

# Every fuzzer for FUZZ_S seconds from its committed corpus; what it finds new stays in the build folder.
fuzz: $(FUZZERS)
	@set -e; for f in $(FUZZERS); do n=$${f##*/fuzz_}; mkdir -p $(BUILD)/fuzz/corpus/$$n; \
	    echo "--- $$n"; $$f -max_total_time=$(FUZZ_S) -artifact_prefix=$(BUILD)/fuzz/ -verbosity=0 -print_final_stats=1 \
	    $(BUILD)/fuzz/corpus/$$n test/fuzz/corpus/$$n; done
# In `make check`: the committed corpora only, each input once.
check-fuzz: $(FUZZERS)
	@set -e; for f in $(FUZZERS); do n=$${f##*/fuzz_}; $$f -runs=0 -verbosity=0 test/fuzz/corpus/$$n 2>/dev/null || \
	    { echo "fuzzer $$n fails on its corpus: $$f test/fuzz/corpus/$$n"; exit 1; }; \
	    echo "$$n: $$(ls test/fuzz/corpus/$$n | wc -l) inputs"; done

# --- what people run ------------------------------------------------------------------------------
# make check = deps, then every kind of test; the last line is "N passed, N failed". Kinds are built one after another, niced, and
# their programs queue up for one scripts/run-tests, which runs what has been built meanwhile.
TALLY = $(BUILD)/tally
QUEUE := $(abspath $(BUILD))/queue
SAN_CHECKS = SANITIZE="$(1)" OPT="-O1 -g" BUILD=$(BUILD)/$(2) CU_BUILD=$(BUILD) TALLY=$(abspath $(TALLY)) LABEL="$(2) " STANDIN_FILES="$(STANDIN_SANITIZED)"
# Of the stand-in's tests, under sanitizers, what others don't have: memory of GPUs, NCCL over nodes. All: make check-standin SANITIZE=…
STANDIN_SANITIZED := test_refit.py test_device_memory.py test_device_library.py test_nodes_nccl.py
KINDS := check-floors check-unit check-integration check-standin check-sim check-faults check-asan check-tsan check-kernels check-fuzz check-libc

check: deps
	@rm -f $(TALLY) $(QUEUE); mkdir -p $(BUILD); touch $(QUEUE)
	@scripts/run-tests --serve $(QUEUE) --filler $$$$ --tally $(TALLY) & failed=0; for t in $(KINDS); do \
	    echo "--- $$t"; RUN_TESTS_QUEUE=$(QUEUE) nice -n 10 $(MAKE) --no-print-directory -j2 $$t || failed=1; done; \
	echo '"end"' >>$(QUEUE); echo "--- all is built"; wait $$! || failed=1; scripts/sum-tally $(TALLY) $$failed

check-unit: $(UNIT) $(STANDIN_PROGRAMS)
	@scripts/run-tests --tally $(TALLY) --log $(BUILD)/log --label "$(LABEL)" --timeout $(RUN_S) $(foreach t,$(UNIT) $(STANDIN_PROGRAMS),-- $(t))
# The limit of one program: sanitized ones are several times slower.
RUN_S := $(if $(SANITIZE),1200,600)

check-asan:
	@$(MAKE) --no-print-directory $(call SAN_CHECKS,-fsanitize=address$(comma)undefined -fno-sanitize-recover=undefined,asan) \
	    check-unit check-sim check-integration check-standin
# Programs that start no thread are not run again: there is nothing to find in them.
check-tsan: $(UNIT)
	@some="$$(scripts/threaded $(UNIT))" && some="$$(basename -a $$some | tr '\n' ' ')" && \
	echo "tsan: $$(echo $$some | wc -w) of $(words $(UNIT)) unit test programs start threads" && \
	TSAN_OPTIONS="suppressions=$(CURDIR)/test/lib/tsan.supp halt_on_error=0 exitcode=66 history_size=7 ignore_noninstrumented_modules=1" \
	    $(MAKE) --no-print-directory $(call SAN_CHECKS,-fsanitize=thread,tsan) UNIT_ONLY="$$some" check-unit check-integration check-standin

# The data plane's folders, with libc alone: no third-party header may be reached (GPU machines have none).
LIBC_SRC = $(filter-out $(CUDA_ONLY),$(wildcard daemon/base/*.c kernels/*.c daemon/device/*.c daemon/memory/*.c daemon/transport/*.c \
    daemon/exec/*.c daemon/topology/topology.c daemon/layout/layout.c daemon/layout/box.c daemon/layout/dtype.c \
    daemon/layout/region.c)) \
    $(filter-out daemon/plan/plan_digest.c,$(wildcard daemon/plan/*.c))
check-libc: $(patsubst %.c,$(BUILD)/obj/%.o,$(LIBC_SRC))
	@! nm -u $^ | grep -E ' (json_|XXH|sqlite3|grpc_|uv_|protobuf_c)' || { echo "third-party symbols in the data plane"; false; }

# --- simulation: test/sim is one program over decider, members, planner and the ledger's twin --------
SIM_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(wildcard test/sim/*.c))
$(BUILD)/test/sim: $(SIM_OBJ) $(call libs,refit) $(call libs,plan)
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $(SIM_OBJ) -Wl,--start-group $(call libs,refit) $(call libs,plan) -Wl,--end-group \
	    $(call ldlibs,refit) $(call ldlibs,plan) -lm

check-sim: $(BUILD)/test/sim
	@scripts/run-tests --tally $(TALLY) --log $(BUILD)/log --label "$(LABEL)" -- $(BUILD)/test/sim

check-floors:
	scripts/check-floors
	scripts/mutants --check

lint: check-floors
	clang-format --dry-run --Werror $$(git ls-files '*.c' '*.h')

format:
	clang-format -i $$(git ls-files '*.c' '*.h')

deps:
	scripts/deps

# make install: programs, library, headers (C clients: reshard.h; reshard/ for clients in other languages), proto, settings.
# DESTDIR, PREFIX and SYSCONFDIR as usual. Settings that are there already stay.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
# Where Debian's Python finds the client under that prefix.
PACKAGES ?= $(PREFIX)/lib/$(if $(filter /usr,$(PREFIX)),python3,$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'))/dist-packages
install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system $(DESTDIR)$(PREFIX)/include/reshard \
	    $(DESTDIR)$(PREFIX)/share/reshard/samples $(DESTDIR)$(PREFIX)/share/doc/reshard $(DESTDIR)$(SYSCONFDIR)/reshard
	install -m 755 $(BUILD)/reshardd $(BUILD)/reshardctl $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(BUILD)/libreshard.so $(DESTDIR)$(PREFIX)/lib/libreshard.so.0
	ln -sf libreshard.so.0 $(DESTDIR)$(PREFIX)/lib/libreshard.so
	install -m 644 client/reshard.h $(DESTDIR)$(PREFIX)/include
	install -m 644 daemon/memory/memory_socket.h kernels/fingerprint.h $(DESTDIR)$(PREFIX)/include/reshard
	install -m 644 proto/reshard.proto proto/health.proto config/reshardd.conf $(DESTDIR)$(PREFIX)/share/reshard
	install -m 644 config/samples/*.json $(DESTDIR)$(PREFIX)/share/reshard/samples
	sed 's|/usr/local|$(PREFIX)|g; s|/etc/reshard|$(SYSCONFDIR)/reshard|g' config/reshardd.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/reshardd.service
	chmod 644 $(DESTDIR)$(PREFIX)/lib/systemd/system/reshardd.service
	test -e $(DESTDIR)$(SYSCONFDIR)/reshard/reshardd.conf || install -m 644 config/reshardd.conf $(DESTDIR)$(SYSCONFDIR)/reshard
	install -m 644 README.md config/FORMATS.md $(DESTDIR)$(PREFIX)/share/doc/reshard
	install -d $(DESTDIR)$(PACKAGES)/reshard
	install -m 644 client/python/reshard/*.py client/python/reshard/py.typed $(DESTDIR)$(PACKAGES)/reshard
	@test -n '$(DESTDIR)' || echo 'installed; run ldconfig if $(PREFIX)/lib is on the path of the loader (else set LD_LIBRARY_PATH)'

help:
	@echo "all check demo bench fuzz install lint format clean; deps (what is missing, by apt)"
	@echo "check is: $(KINDS)"
	@echo "by hand: faults FAULTS=60 SEED= NODES= (crash tests); check-model (spin); mutants MUTANTS=--first (the decider's rules)"
	@echo "demo: MODEL=qwen3-0.6b TRANSPORT=memory NODES=1 RATE=; bench: ROWS=; fuzz: FUZZ_S=60; check-standin: STANDIN_SEED= SEGMENTS= STANDIN_FILES="
	@echo "BUILD=build CUDA=$(CUDA) SANITIZE= OPT=\"$(OPT)\" V=0 PREFIX=$(PREFIX) SYSCONFDIR=$(SYSCONFDIR) DESTDIR="

clean:
	rm -rf $(BUILD)

-include $(shell find $(BUILD)/obj $(BUILD)/fuzz/obj -name '*.d' 2>/dev/null)
