# libreshard, reshardctl, and the demo's worker. Included by the Makefile.
#
# The library is everything in client/ but the programs; it takes in the archives of base, layout and
# rpc, hidden, and exports reshard_* alone.
CLIENT_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(CLIENT_SRC))
CLIENT_LIBS := $(foreach f,rpc layout base,$(call lib_of,$(f))) $(BUILD)/lib/libproto.a
CLIENT_LDLIBS := -lgrpc -lgpr -luv -lprotobuf-c -lcrypto -ljansson -lxxhash -lpthread
CTL_SRC := $(wildcard client/reshardctl.c client/cmd.c client/ctl_*.c client/cmd_*.c)
CTL_OBJ := $(patsubst %.c,$(BUILD)/obj/%.o,$(CTL_SRC))
CTL_OBJ += $(BUILD)/obj/client/page.o
CTL_LIBS := $(call lib_of,plan) $(call lib_of,topology)

$(BUILD)/libreshard.so: $(CLIENT_OBJ) $(CLIENT_LIBS)
	$(Q)$(CC) -shared -Wl,-soname,libreshard.so.0 -Wl,-z,defs $(LDFLAGS_ALL) -o $@ $(CLIENT_OBJ) \
	    -Wl,--start-group $(CLIENT_LIBS) -Wl,--end-group $(CLIENT_LDLIBS)
	@ln -sf libreshard.so $(BUILD)/libreshard.so.0

$(BUILD)/reshardctl: $(CTL_OBJ) $(BUILD)/lib/libclient.a $(CTL_LIBS) $(CLIENT_LIBS)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $(CTL_OBJ) -Wl,--start-group $(BUILD)/lib/libclient.a $(CTL_LIBS) \
	    $(CLIENT_LIBS) -Wl,--end-group $(CLIENT_LDLIBS) -lmicrohttpd

# The page of `reshardctl serve`, as it is.
$(BUILD)/obj/client/page.o: client/page.html
	@mkdir -p $(@D)
	$(Q)printf '.section .rodata\n.global rs_page, rs_page_end\nrs_page:\n.incbin "%s"\nrs_page_end:\n.byte 0\n.section .note.GNU-stack,"",%%progbits\n' $< | \
	    $(CC) -x assembler -c -o $@ -

# As a user's program is built: the header and the shared library, nothing else.
$(BUILD)/demo_worker: $(BUILD)/obj/client/demo_worker.o $(BUILD)/libreshard.so
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $< -L$(BUILD) -lreshard -Wl,-rpath,'$$ORIGIN'

demo:
	scripts/deps
	$(MAKE) -j$$(nproc) BUILD=$(BUILD) $(BUILD)/reshardd $(BUILD)/reshardctl $(BUILD)/demo_worker
	scripts/demo --build $(BUILD) $(if $(TRANSPORT),--transport $(TRANSPORT)) $(if $(NODES),--nodes $(NODES)) $(if $(RATE),--rate $(RATE)) $(MODEL)

all: $(BUILD)/libreshard.so $(BUILD)/reshardctl $(BUILD)/demo_worker

FUZZ_client := client

# --- libreshard and reshardctl against the real daemon ----------------------------------------------
$(BUILD)/test/integration/test_libreshard: $(BUILD)/obj/test/integration/test_libreshard.o $(BUILD)/libreshard.so
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $< -L$(BUILD) -lreshard -Wl,-rpath,'$$ORIGIN/../..' \
	    $(shell pkg-config --libs check)

# The Python tests of reshardctl run with the others; they need these programs.
.PHONY: check-client
check-client: $(BUILD)/reshardd $(BUILD)/test/integration/test_libreshard
	@RESHARD_BUILD=$(BUILD) scripts/run-tests --tally $(TALLY) --log $(BUILD)/log --label "$(LABEL)" \
	    -- $(BUILD)/test/integration/test_libreshard
check-integration: check-client $(BUILD)/reshardctl $(BUILD)/demo_worker
# Its calls for GPU memory, against the daemon on the stand-in.
check-standin: $(BUILD)/libreshard.so
