/* What a peer that knows the token may send: any bytes behind a good hello, to a transport that
 * waits for two messages. The group must end, and nothing may land beside its buffers. Each 64
 * bytes of the input become a header that looks right (magic, devices, epoch; the attempt by one
 * byte), as much payload follows as its length says and the input has. Every input goes through the
 * decoders as it is, too. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/tcp_frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { EPOCH = 3, BYTES = 100, CANARY = 0x5A };

static struct transport_tcp_node *node;
static struct transport *transport;
static struct device_stream *stream;
static uint64_t attempt;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static int n_ended;

static void on_done(struct transport_group *g, int status, const struct err *e)
{
    (void)g;
    if (status != 0 && e->text[0] == '\0')
        abort();
    pthread_mutex_lock(&mutex);
    n_ended++;
    pthread_cond_signal(&ended);
    pthread_mutex_unlock(&mutex);
}

static void open_once(void)
{
    struct transport_tcp_device devices[2] = {{0}, {.address = "127.0.0.1", .port = 1}};
    struct transport_tcp_options options = {.streams = 1};
    struct device_host_options host = {0};
    struct device *device;
    if (transport != NULL)
        return;
    if (device_host_open(0, &host, &device, NULL) != 0 ||
        device_stream_new(device, "net", &stream, NULL) != 0 ||
        transport_tcp_node_open("127.0.0.1", 0, &node, NULL) != 0)
        abort();
    devices[0].device = device;
    if (transport_tcp_open(node, devices, 2, EPOCH, &options, &transport, NULL) != 0)
        abort();
}

static void decode(const uint8_t *data, size_t size)
{
    uint8_t back[TCP_FRAME_BYTES];
    struct tcp_frame f;
    struct tcp_hello h;
    if (size >= TCP_FRAME_BYTES && tcp_frame_unpack(data, &f) == 0) {
        tcp_frame_pack(&f, back);
        if (memcmp(back, data, TCP_FRAME_BYTES) != 0)
            abort();
    }
    if (size >= TCP_HELLO_BYTES && tcp_hello_unpack(data, &h) == 0) {
        tcp_hello_pack(&h, back);
        if (memcmp(back, data, TCP_HELLO_BYTES) != 0)
            abort();
    }
}

static int dial(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(transport_tcp_node_port(node)),
                            .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    struct tcp_hello h = {.protocol = TCP_PROTOCOL, .epoch = EPOCH, .attempt = attempt, .from = 1};
    uint8_t hello[TCP_HELLO_BYTES];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    tcp_hello_pack(&h, hello);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0 ||
        send(fd, hello, sizeof(hello), MSG_NOSIGNAL) != (ssize_t)sizeof(hello))
        abort();
    return fd;
}

/* Header by header; send may fail once the other side has had enough. */
static void feed(int fd, const uint8_t *data, size_t size)
{
    uint8_t header[TCP_FRAME_BYTES];
    struct tcp_frame like = {.type = TCP_ALIVE, .from = 1, .epoch = EPOCH};
    while (size >= TCP_FRAME_BYTES) {
        uint8_t right[TCP_FRAME_BYTES];
        uint32_t length;
        memcpy(header, data, sizeof(header));
        like.attempt = attempt + (data[16] == 1) - (data[16] == 2);
        tcp_frame_pack(&like, right);
        memcpy(header, right, 4);           /* magic */
        memcpy(header + 8, right + 8, 16);  /* epoch, attempt */
        memcpy(header + 52, right + 52, 8); /* from, to */
        memcpy(&length, header + 48, sizeof(length));
        data += TCP_FRAME_BYTES;
        size -= TCP_FRAME_BYTES;
        size_t n = length < size ? length : size;
        (void)send(fd, header, sizeof(header), MSG_NOSIGNAL);
        (void)send(fd, data, n, MSG_NOSIGNAL);
        data += n;
        size -= n;
    }
    (void)send(fd, data, size, MSG_NOSIGNAL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t memory[3 * BYTES];
    struct transport_message receives[2] = {
        {memory + BYTES, BYTES / 2, 1, false, true, 0, NULL, 0},
        {memory + BYTES + BYTES / 2, BYTES / 2, 1, false, true, 0, NULL, 0}};
    struct transport_group group = {receives, 2, on_done, NULL};
    open_once();
    decode(data, size);
    memset(memory, CANARY, sizeof(memory));
    attempt += 3;
    n_ended = 0;
    if (transport_begin(transport, attempt, NULL) != 0 ||
        transport_enqueue(transport, 0, stream, &group) != 0)
        abort();
    int fd = dial();
    feed(fd, data, size);
    close(fd); /* which ends the group, where nothing else does */
    pthread_mutex_lock(&mutex);
    while (n_ended == 0)
        pthread_cond_wait(&ended, &mutex);
    pthread_mutex_unlock(&mutex);
    for (size_t i = 0; i < BYTES; i++)
        if (memory[i] != CANARY || memory[2 * BYTES + i] != CANARY)
            abort();
    return 0;
}
