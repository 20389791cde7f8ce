/* A wide-area link between two packet descriptors: rate, queue, delay, jitter, loss, flow cap.
 *
 *     wan_forwarder NEAR_FD FAR_FD        (wan.py compiles and starts it)
 *
 * Each descriptor carries one IPv4 packet a call behind a struct virtio_net_hdr, as a TUN device
 * with IFF_VNET_HDR and TUN_F_CSUM | TUN_F_TSO4 does: a TCP super-packet of up to 64 KiB passes
 * whole, with its checksum left to fill in. On the path it counts as the segments it stands for:
 * each has its own headers on the wire, its own place in the queue and its own chance to be lost.
 * A super-packet with lost segments becomes one packet for each run of survivors.
 *
 * Commands come on stdin, one a line and one a write; each is answered by one line on stdout:
 *     path RATE_BIT_PER_S DELAY_NS JITTER_NS LOSS QUEUE_BYTES FLOW_CAP_BIT_PER_S FLOW_QUEUE_BYTES
 *         for both directions from now on, and counters from zero; a rate or cap of 0 is no limit
 *     counters
 *         a JSON object of both directions
 * The end of stdin ends the program.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/virtio_net.h>
#include <malloc.h>
#include <math.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_READ (sizeof(struct virtio_net_hdr) + 65536)
#define MAX_BATCH 32      /* packets one way before the other way has its turn */
#define MAX_FLOWS 256     /* capped at a time; more share the last one's cap */
#define LATE_NS 1000000

struct packet {
    struct packet *next;
    int64_t due_ns;       /* leaves the queue that it is in */
    int length;           /* bytes of `data`, the virtio header with them */
    int header;           /* IP and TCP header bytes; 0 if the packet cannot be cut */
    int segment;          /* TCP payload bytes of every segment but the last */
    int num_segments;
    unsigned char data[]; /* struct virtio_net_hdr, then the IP packet */
};

struct fifo { struct packet *first, *last; };

/* A bottleneck: bytes leave it at a rate, and those that find `limit_bytes` waiting are dropped. */
struct bottleneck { double ns_per_byte; int64_t limit_bytes, idle_at_ns; };

struct flow { uint32_t addresses[2], ports; struct bottleneck cap; struct fifo queue; };

struct counters {
    uint64_t segments, bytes, delivered_segments, lost_segments, dropped_segments;
    uint64_t packets_out, late_packets, refused_packets;
    int64_t latest_ns;
};

struct direction {
    int source, sink;
    struct bottleneck link;
    int64_t delay_ns, jitter_ns, last_due_ns;
    double loss;
    uint64_t until_loss;  /* segments that pass before the next one is lost */
    struct fifo on_way;
    double flow_ns_per_byte;
    int64_t flow_limit_bytes;
    struct flow flows[MAX_FLOWS];
    int num_flows;
    struct counters counters;
};

static struct direction directions[2]; /* to_far, to_near */
static uint64_t random_state = 0x9E3779B97F4A7C15u;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Uniform in (0, 1): xorshift64*. */
static double uniform(void)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return ((random_state * 0x2545F4914F6CDD1Du >> 11) + 0.5) / 9007199254740992.0;
}

/* How many segments pass before one is lost, when each is lost with probability `loss`. */
static uint64_t draw_until_loss(double loss)
{
    if (loss <= 0)
        return UINT64_MAX;
    return loss >= 1 ? 0 : (uint64_t)(log(uniform()) / log1p(-loss));
}

static void push(struct fifo *fifo, struct packet *p)
{
    p->next = NULL;
    if (fifo->first)
        fifo->last->next = p;
    else
        fifo->first = p;
    fifo->last = p;
}

static struct packet *pop(struct fifo *fifo)
{
    struct packet *p = fifo->first;
    fifo->first = p->next;
    return p;
}

static uint32_t add_words(uint32_t sum, const void *bytes, int length)
{
    const unsigned char *b = bytes;
    for (int i = 0; i + 1 < length; i += 2)
        sum += b[i] << 8 | b[i + 1];
    return sum;
}

static uint16_t fold(uint32_t sum)
{
    sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)(sum + (sum >> 16));
}

static struct iphdr *ip_of(struct packet *p)
{
    return (struct iphdr *)(p->data + sizeof(struct virtio_net_hdr));
}

/* Find out which segments the packet stands for. */
static void measure(struct packet *p)
{
    struct virtio_net_hdr *virtio = (struct virtio_net_hdr *)p->data;
    struct iphdr *ip = ip_of(p);
    p->header = p->segment = 0;
    p->num_segments = 1;
    if ((virtio->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) != VIRTIO_NET_HDR_GSO_TCPV4)
        return;
    struct tcphdr *tcp = (struct tcphdr *)((unsigned char *)ip + ip->ihl * 4);
    p->header = ip->ihl * 4 + tcp->doff * 4;
    p->segment = virtio->gso_size;
    int payload = p->length - (int)sizeof *virtio - p->header;
    p->num_segments = (payload + p->segment - 1) / p->segment;
}

/* Bytes on the wire of the packet's first `count` segments, headers with them. */
static int64_t wire_bytes(const struct packet *p, int count)
{
    int64_t length = p->length - (int)sizeof(struct virtio_net_hdr);
    if (count == p->num_segments)
        return length + (int64_t)(count - 1) * p->header;
    return (int64_t)count * (p->header + p->segment);
}

/* A packet of its own of `count` of the segments from `first` on. */
static struct packet *cut(struct packet *p, int first, int count)
{
    int prefix = (int)sizeof(struct virtio_net_hdr) + p->header;
    int begin = prefix + first * p->segment;
    bool is_tail = first + count == p->num_segments;
    int payload = is_tail ? p->length - begin : count * p->segment;

    struct packet *q = malloc(sizeof *q + prefix + payload);
    *q = *p;
    q->length = prefix + payload;
    q->num_segments = count;
    memcpy(q->data, p->data, prefix);
    memcpy(q->data + prefix, p->data + begin, payload);

    struct virtio_net_hdr *virtio = (struct virtio_net_hdr *)q->data;
    virtio->hdr_len = p->header;
    if (count == 1) {
        virtio->gso_type = VIRTIO_NET_HDR_GSO_NONE;
        virtio->gso_size = 0;
    }
    struct iphdr *ip = ip_of(q);
    ip->tot_len = htons(p->header + payload);
    ip->id = htons(ntohs(ip->id) + first);
    ip->check = 0;
    ip->check = htons(~fold(add_words(0, ip, ip->ihl * 4)));

    struct tcphdr *tcp = (struct tcphdr *)((unsigned char *)ip + ip->ihl * 4);
    tcp->seq = htonl(ntohl(tcp->seq) + first * p->segment);
    if (first)
        tcp->res2 &= 1; /* CWR goes with the first segment only */
    if (!is_tail)
        tcp->fin = tcp->psh = 0;
    /* NEEDS_CSUM: the field holds the pseudo-header's sum; the kernel adds the rest. */
    uint32_t pseudo = add_words(IPPROTO_TCP + tcp->doff * 4 + payload, &ip->saddr, 8);
    tcp->check = htons(fold(pseudo));
    return q;
}

/* Put the packet's segments into the queue: how many fit. `begin_ns`: the first starts to leave. */
static int admit(struct bottleneck *b, const struct packet *p, int64_t at_ns, int64_t *begin_ns)
{
    int fit = p->num_segments;
    *begin_ns = b->idle_at_ns > at_ns ? b->idle_at_ns : at_ns;
    if (b->ns_per_byte <= 0)
        return fit;
    int64_t room = b->limit_bytes - (int64_t)((*begin_ns - at_ns) / b->ns_per_byte);
    if (wire_bytes(p, fit) > room)
        fit = p->header && room > 0 ? (int)(room / (p->header + p->segment)) : 0;
    if (fit)
        b->idle_at_ns = *begin_ns + (int64_t)(wire_bytes(p, fit) * b->ns_per_byte);
    return fit;
}

/* The packet has reached the far end of the link but for the delay. */
static void depart(struct direction *d, struct packet *p, int64_t at_ns)
{
    p->due_ns = at_ns + d->delay_ns + (int64_t)(d->jitter_ns * uniform());
    if (p->due_ns < d->last_due_ns)
        p->due_ns = d->last_due_ns; /* jitter does not reorder */
    d->last_due_ns = p->due_ns;
    push(&d->on_way, p);
}

/* Through the link's queue at `at_ns`; what is lost is lost after it took its time on the wire. */
static void cross(struct direction *d, struct packet *p, int64_t at_ns)
{
    int64_t begin_ns;
    int fit = admit(&d->link, p, at_ns, &begin_ns);
    d->counters.dropped_segments += p->num_segments - fit;
    if (fit == p->num_segments && d->until_loss >= (uint64_t)fit) {
        if (d->until_loss != UINT64_MAX)
            d->until_loss -= fit;
        depart(d, p, begin_ns + (int64_t)(wire_bytes(p, fit) * d->link.ns_per_byte));
        return;
    }
    for (int first = 0; first < fit; first++) { /* one lost segment a turn */
        int run = d->until_loss < (uint64_t)(fit - first) ? (int)d->until_loss : fit - first;
        if (run) {
            struct packet *q = cut(p, first, run);
            first += run;
            depart(d, q, begin_ns + (int64_t)(wire_bytes(p, first) * d->link.ns_per_byte));
        }
        if (d->until_loss != UINT64_MAX)
            d->until_loss -= run;
        if (first < fit) {
            d->counters.lost_segments++;
            d->until_loss = draw_until_loss(d->loss);
        }
    }
    free(p);
}

/* The flow of a TCP packet: the one it had, else one with nothing waiting, else a new one. */
static struct flow *flow_of(struct direction *d, struct iphdr *ip, int64_t at_ns)
{
    uint32_t ports;
    memcpy(&ports, (unsigned char *)ip + ip->ihl * 4, sizeof ports);
    struct flow *idle = NULL;
    for (int i = 0; i < d->num_flows; i++) {
        struct flow *f = &d->flows[i];
        if (f->ports == ports && f->addresses[0] == ip->saddr && f->addresses[1] == ip->daddr)
            return f;
        if (!f->queue.first && f->cap.idle_at_ns <= at_ns)
            idle = f;
    }
    if (!idle)
        idle = &d->flows[d->num_flows < MAX_FLOWS ? d->num_flows++ : MAX_FLOWS - 1];
    idle->addresses[0] = ip->saddr;
    idle->addresses[1] = ip->daddr;
    idle->ports = ports;
    return idle;
}

/* A packet came in: to its flow's cap where there is one, else straight to the link. */
static void enter(struct direction *d, struct packet *p, int64_t at_ns)
{
    struct iphdr *ip = ip_of(p);
    d->counters.segments += p->num_segments;
    d->counters.bytes += wire_bytes(p, p->num_segments);
    if (d->flow_ns_per_byte <= 0 || ip->version != 4 || ip->protocol != IPPROTO_TCP) {
        cross(d, p, at_ns);
        return;
    }
    struct flow *f = flow_of(d, ip, at_ns);
    f->cap.ns_per_byte = d->flow_ns_per_byte;
    f->cap.limit_bytes = d->flow_limit_bytes;
    int64_t begin_ns;
    int fit = admit(&f->cap, p, at_ns, &begin_ns);
    d->counters.dropped_segments += p->num_segments - fit;
    if (fit < p->num_segments) {
        struct packet *whole = p;
        p = fit ? cut(whole, 0, fit) : NULL;
        free(whole);
    }
    if (p) {
        p->due_ns = f->cap.idle_at_ns;
        push(&f->queue, p);
    }
}

/* Hand what left its flow's cap by now to the link, the earliest first. */
static void leave_caps(struct direction *d, int64_t at_ns)
{
    for (;;) {
        struct flow *earliest = NULL;
        for (int i = 0; i < d->num_flows; i++) {
            struct packet *p = d->flows[i].queue.first;
            if (p && (!earliest || p->due_ns < earliest->queue.first->due_ns))
                earliest = &d->flows[i];
        }
        if (!earliest || earliest->queue.first->due_ns > at_ns)
            return;
        struct packet *p = pop(&earliest->queue);
        cross(d, p, p->due_ns);
    }
}

static void receive(struct direction *d)
{
    for (int i = 0; i < MAX_BATCH; i++) {
        struct packet *p = malloc(sizeof *p + MAX_READ);
        ssize_t length = read(d->source, p->data, MAX_READ);
        if (length <= (ssize_t)(sizeof(struct virtio_net_hdr) + sizeof(struct iphdr))) {
            free(p);
            if (length < 0)
                return; /* EAGAIN: nothing more; EIO: the device is down */
            continue;
        }
        p->length = (int)length;
        measure(p);
        enter(d, realloc(p, sizeof *p + length), now_ns());
    }
}

static void deliver(struct direction *d)
{
    for (int i = 0; i < MAX_BATCH && d->on_way.first; i++) {
        int64_t late_ns = now_ns() - d->on_way.first->due_ns;
        if (late_ns < 0)
            return;
        struct packet *p = pop(&d->on_way);
        d->counters.packets_out++;
        d->counters.delivered_segments += p->num_segments;
        d->counters.late_packets += late_ns > LATE_NS;
        if (late_ns > d->counters.latest_ns)
            d->counters.latest_ns = late_ns;
        if (write(d->sink, p->data, p->length) != p->length)
            d->counters.refused_packets++;
        free(p);
    }
}

/* The next moment at which something is due, or INT64_MAX. */
static int64_t next_due_ns(void)
{
    int64_t next_ns = INT64_MAX;
    for (int way = 0; way < 2; way++) {
        struct direction *d = &directions[way];
        if (d->on_way.first && d->on_way.first->due_ns < next_ns)
            next_ns = d->on_way.first->due_ns;
        for (int i = 0; i < d->num_flows; i++)
            if (d->flows[i].queue.first && d->flows[i].queue.first->due_ns < next_ns)
                next_ns = d->flows[i].queue.first->due_ns;
    }
    return next_ns;
}

static bool set_path(const char *line)
{
    double rate, loss, cap;
    int64_t delay_ns, jitter_ns, queue, flow_queue;
    if (sscanf(line, "path %lf %" SCNd64 " %" SCNd64 " %lf %" SCNd64 " %lf %" SCNd64, &rate,
               &delay_ns, &jitter_ns, &loss, &queue, &cap, &flow_queue) != 7)
        return false;
    for (int way = 0; way < 2; way++) {
        struct direction *d = &directions[way];
        d->link.ns_per_byte = rate > 0 ? 8e9 / rate : 0;
        d->link.limit_bytes = queue;
        d->delay_ns = delay_ns;
        d->jitter_ns = jitter_ns;
        d->loss = loss;
        d->until_loss = draw_until_loss(loss);
        d->flow_ns_per_byte = cap > 0 ? 8e9 / cap : 0;
        d->flow_limit_bytes = flow_queue;
        d->counters = (struct counters){0};
    }
    puts("ok");
    return true;
}

static void print_counters(void)
{
    static const char *const names[2] = {"to_far", "to_near"};
    for (int way = 0; way < 2; way++) {
        const struct counters *c = &directions[way].counters;
        printf("%s\"%s\": {\"segments\": %" PRIu64 ", \"bytes\": %" PRIu64
               ", \"delivered_segments\": %" PRIu64 ", \"lost_segments\": %" PRIu64
               ", \"dropped_segments\": %" PRIu64 ", \"packets_out\": %" PRIu64
               ", \"late_packets\": %" PRIu64 ", \"refused_packets\": %" PRIu64
               ", \"latest_ms\": %.3f}",
               way ? ", " : "{", names[way], c->segments, c->bytes, c->delivered_segments,
               c->lost_segments, c->dropped_segments, c->packets_out, c->late_packets,
               c->refused_packets, c->latest_ns / 1e6);
    }
    puts("}");
}

/* Obey what is on stdin; false at its end. */
static bool obey(void)
{
    char text[1024];
    ssize_t length = read(STDIN_FILENO, text, sizeof text - 1);
    if (length <= 0)
        return false;
    text[length] = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (!strcmp(line, "counters"))
            print_counters();
        else if (!set_path(line))
            printf("cannot obey: %s\n", line);
    }
    fflush(stdout);
    return true;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: wan_forwarder NEAR_FD FAR_FD\n");
        return 2;
    }
    struct pollfd polled[3] = {{.fd = atoi(argv[1])}, {.fd = atoi(argv[2])}, {.fd = STDIN_FILENO}};
    for (int way = 0; way < 2; way++) {
        directions[way].source = polled[way].fd;
        directions[way].sink = polled[!way].fd;
        directions[way].until_loss = UINT64_MAX;
        fcntl(polled[way].fd, F_SETFL, O_NONBLOCK);
    }
    prctl(PR_SET_TIMERSLACK, 1);            /* wake up when asked, not up to 50 us later */
    mallopt(M_TRIM_THRESHOLD, 512 << 20);   /* the heap stays: no page is faulted in twice */
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    for (;;) {
        int64_t at_ns = now_ns(), next_ns;
        for (int way = 0; way < 2; way++) {
            leave_caps(&directions[way], at_ns);
            deliver(&directions[way]);
        }
        next_ns = next_due_ns();
        at_ns = now_ns();
        int64_t wait_ns = next_ns > at_ns ? next_ns - at_ns : 0;
        struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
        for (int i = 0; i < 3; i++)
            polled[i].events = POLLIN;
        ppoll(polled, 3, next_ns == INT64_MAX ? NULL : &wait, NULL);
        for (int way = 0; way < 2; way++)
            if (polled[way].revents & POLLIN)
                receive(&directions[way]);
        if (polled[2].revents && !obey())
            return 0;
    }
}
