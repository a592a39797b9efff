/*
 * What no step changes: the lengths, the contents, and the peer's address.
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
