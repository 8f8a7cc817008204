// One direction of a link between two TUN devices: a packet leaves when the ones before it have left at the rate, and
// arrives after the delay. A packet is what `read` returns: a virtio_net_hdr and up to 64 KiB, which may be many segments
// (TCP segmentation offload), as between a kernel and its network card.
#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MOST_BYTES (65536 + 64) // of a packet
#define MOST_PACKETS 2048       // under way; then the device keeps what comes, and drops what it has no room for
#define AT_ONCE 16              // packets read between two deliveries
#define LOOK_NS 50000000        // how often an idle link looks whether it is to end

typedef struct {
    volatile int64_t delay_ns;
    volatile double ns_per_byte; // 0: unlimited
    volatile int64_t ending;
    volatile int64_t cut; // packets are lost
} direction;

typedef struct packet {
    struct packet *next;
    int64_t due;
    ssize_t length;
    char bytes[MOST_BYTES];
} packet;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Carry packets from one device to the other until `ending` is set. Returns 0, or -1 if the device is gone.
int ubatch_carry(int from, int to, direction *d) {
    packet *first = NULL, **end = &first, *spare = NULL; // under way, oldest first; and memory, last used first
    int count = 0;
    int64_t free_at = 0; // when the last packet has left
    struct pollfd ready = {from, POLLIN, 0};
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!d->ending && !(ready.revents & POLLERR)) {
        while (first && first->due <= now()) {
            packet *done = first;
            if (write(to, done->bytes, done->length) < 0) { /* the other end is down: lost, as on any link */ }
            if (!(first = done->next)) end = &first;
            done->next = spare, spare = done, count--;
        }
        int64_t wait = first ? first->due - now() : LOOK_NS;
        wait = wait < 0 ? 0 : wait < LOOK_NS ? wait : LOOK_NS;
        ready.revents = 0;
        ppoll(&ready, count < MOST_PACKETS, &(struct timespec){0, wait}, NULL);
        for (int n = 0; n < AT_ONCE && ready.revents & POLLIN; n++) {
            packet *p = spare ? spare : malloc(sizeof *p);
            if (!p) break;
            spare = p == spare ? p->next : spare;
            p->length = read(from, p->bytes, MOST_BYTES);
            if (p->length <= 0) {
                p->next = spare, spare = p;
                break;
            }
            if (d->cut) {
                p->next = spare, spare = p;
                continue;
            }
            int64_t start = now();
            free_at = (free_at > start ? free_at : start) + (int64_t)(p->length * d->ns_per_byte);
            p->due = free_at + d->delay_ns, p->next = NULL;
            *end = p, end = &p->next, count++;
        }
    }
    for (*end = spare; first; first = spare) {
        spare = first->next;
        free(first);
    }
    return ready.revents & POLLERR ? -1 : 0;
}
