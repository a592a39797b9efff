/* Connects to ADDRESS PORT, and exits without a word. */
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_id *id;

	if (argc != 3 || rdma_getaddrinfo(argv[1], argv[2], &hints, &found) ||
	    rdma_create_ep(&id, found, NULL, &attr) || rdma_connect(id, &param)) {
		perror("exits");
		return 1;
	}
	puts("connected");
	exit(0);
}
