/*
 * The parts common to all steps: the command line, the lengths and contents, and the peer's address.
 */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { ROUNDS = 100, SHORT = 64, BLOCKS = 256, BLOCK = 64 * 1024 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void fill(unsigned char *data, size_t len, unsigned seed) {
    for (size_t i = 0; i < len; i++)
        data[i] = (unsigned char)((i + seed) * 2654435761u >> 13);
}

static uint32_t checksum(uint32_t sum, const unsigned char *data, size_t len) {
    for (size_t i = 0; i < len; i++)
        sum = (sum ^ data[i]) * 16777619u;
    return sum;
}

static struct addrinfo *resolve(const char *address, const char *port) {
    struct addrinfo hints, *found;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    int error = getaddrinfo(address, port, &hints, &found);
    if (error != 0) {
        fprintf(stderr, "%s port %s: %s\n", address, port, gai_strerror(error));
        exit(1);
    }
    return found;
}

static void say_port(const struct sockaddr_storage *name) {
    in_port_t port = name->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)name)->sin6_port
                                                 : ((const struct sockaddr_in *)name)->sin_port;
    printf("port %d\n", ntohs(port));
    fflush(stdout);
}

static void closed_by_peer(void) {
    fprintf(stderr, "the peer has closed the connection\n");
    exit(1);
}

static void check_message(unsigned number, const unsigned char *sent, const unsigned char *answer) {
    if (memcmp(sent, answer, SHORT) != 0) {
        fprintf(stderr, "message %u came back changed\n", number);
        exit(1);
    }
}

static void check_sum(uint32_t theirs, uint32_t sum) {
    if (ntohl(theirs) != sum) {
        fprintf(stderr, "the checksum is %08x and should be %08x\n", ntohl(theirs), sum);
        exit(1);
    }
}

typedef void side(const char *address, const char *port);

static int run(int argc, char **argv, side *server, side *client) {
    if (argc >= 3 && strcmp(argv[1], "server") == 0) {
        server(argv[2], argc > 3 ? argv[3] : "0");
    } else if (argc == 4 && strcmp(argv[1], "client") == 0) {
        client(argv[2], argv[3]);
    } else {
        fprintf(stderr, "usage: %s server ADDRESS [PORT]\n       %s client ADDRESS PORT\n", argv[0], argv[0]);
        return 2;
    }
    return 0;
}
