//! A peer that is a plain socket: it sends any bytes, and reads what comes back.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use weft_wire::crc::crc32c;
use weft_wire::ddp::{Header, MAX_LEN, Tagged, Untagged};
use weft_wire::mpa::{
    CRC_LEN, Enhanced, FPDU_HEADER_LEN, FrameKind, MAX_PRIVATE_DATA, START_HEADER_LEN, StartFrame,
    fpdu_len,
};
use weft_wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest, Terminate};

use crate::bed::PATIENCE;
use crate::local::{Local, frame};

pub struct Raw {
    pub stream: TcpStream,
    /// FPDUs carry CRCs.
    pub crc: bool,
    /// The channel of the frames once both sides are in shared memory.
    pub local: Option<Local>,
}

/// A start-up frame of a peer that follows the rules.
pub fn start_frame(kind: FrameKind, crc: bool, depth: u16) -> StartFrame<'static> {
    StartFrame {
        kind,
        markers: false,
        crc,
        reject: false,
        revision: 2,
        enhanced: Some(Enhanced {
            ird: depth,
            ord: depth,
            ..Enhanced::default()
        }),
        private_data: &[],
    }
}

impl Raw {
    /// Connects, and sends nothing.
    pub fn connect(addr: SocketAddr) -> Raw {
        let stream = TcpStream::connect(addr).expect("connect");
        Raw::over(stream)
    }

    /// A peer on a connected socket.
    pub fn over(stream: TcpStream) -> Raw {
        stream.set_read_timeout(Some(PATIENCE)).expect("time-out");
        stream.set_write_timeout(Some(PATIENCE)).expect("time-out");
        stream.set_nodelay(true).expect("no delay");
        Raw {
            stream,
            crc: false,
            local: None,
        }
    }

    /// Connects and sends a valid request.
    pub fn request(addr: SocketAddr, crc: bool, depth: u16) -> Raw {
        let mut raw = Raw::connect(addr);
        raw.crc = crc;
        raw.send(&start_frame(FrameKind::Request, crc, depth).emit());
        raw
    }

    /// Connects, joins at the door for peers of the same host, and sends a valid request.
    pub fn local_request(addr: SocketAddr, depth: u16) -> Raw {
        let mut raw = Raw::connect(addr);
        raw.local = Some(Local::knock(&raw.stream).expect("a welcome"));
        raw.send_start(&start_frame(FrameKind::Request, false, depth).emit());
        raw
    }

    /// Sends a start frame: start frames use TCP on every wire.
    pub fn send_start(&mut self, frame: &[u8]) {
        self.stream.write_all(frame).expect("a start frame");
    }

    /// Reads the reply to [`Raw::request`]; true if it accepts.
    pub fn reply(&mut self) -> bool {
        if let Some(local) = &mut self.local {
            assert!(local.attached());
        }
        let frame = self.read_start();
        let (reply, used) = StartFrame::parse(FrameKind::Reply, &frame)
            .expect("a good reply")
            .expect("a whole reply");
        assert_eq!(used, frame.len());
        !reply.reject
    }

    /// Accepts the connection of an initiator, reads its request and accepts that.
    pub fn accept(listener: &TcpListener, crc: bool, depth: u16) -> Raw {
        let (stream, _) = listener.accept().expect("accept");
        let mut raw = Raw::over(stream);
        raw.crc = crc;
        let frame = raw.read_start();
        StartFrame::parse(FrameKind::Request, &frame)
            .expect("a good request")
            .expect("a whole request");
        raw.send(&start_frame(FrameKind::Reply, crc, depth).emit());
        raw
    }

    /// The same, after the initiator has joined at our own door.
    pub fn accept_local(listener: &TcpListener, door: &OwnedFd, depth: u16) -> Raw {
        let (stream, _) = listener.accept().expect("accept");
        let mut raw = Raw::over(stream);
        let local = Local::welcome(door);
        let frame = raw.read_start();
        StartFrame::parse(FrameKind::Request, &frame)
            .expect("a good request")
            .expect("a whole request");
        local.attach();
        raw.local = Some(local);
        raw.send_start(&start_frame(FrameKind::Reply, false, depth).emit());
        raw
    }

    /// The number of descriptors that it holds.
    pub fn descriptors(&self) -> usize {
        1 + self.local.as_ref().map_or(0, Local::descriptors)
    }

    fn read_start(&mut self) -> Vec<u8> {
        let mut frame = vec![0; START_HEADER_LEN];
        self.stream.read_exact(&mut frame).expect("a start frame");
        let len = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
        assert!(len <= MAX_PRIVATE_DATA);
        frame.resize(START_HEADER_LEN + len, 0);
        let rest = &mut frame[START_HEADER_LEN..];
        self.stream.read_exact(rest).expect("private data");
        frame
    }

    /// Sends these bytes unchanged. A victim that has closed meanwhile does not fail the test.
    pub fn send(&mut self, bytes: &[u8]) {
        if let Some(local) = &self.local {
            local.send(bytes);
            return;
        }
        match self.stream.write_all(bytes) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {}
            Err(e) => panic!("sending: {e}"),
        }
    }

    /// Sends ULPDUs, each in its own FPDU, all in one write.
    pub fn send_ulpdus(&mut self, ulpdus: &[Vec<u8>]) {
        let mut bytes = Vec::new();
        for ulpdu in ulpdus {
            bytes.extend(self.framed(ulpdu));
        }
        self.send(&bytes);
    }

    /// The frame of a ULPDU on this wire.
    pub fn framed(&self, ulpdu: &[u8]) -> Vec<u8> {
        if self.local.is_some() {
            frame(ulpdu)
        } else {
            fpdu(ulpdu, self.crc)
        }
    }

    /// Reads and discards all bytes up to the end.
    pub fn read_to_end(&mut self) {
        if let Some(local) = &mut self.local {
            while local.read(1).is_some() {}
        }
        let _ = self.stream.read_to_end(&mut Vec::new());
    }

    /// The next ULPDU; `None` at the end of the stream. A frame that is cut or has a wrong CRC is a failure.
    pub fn ulpdu(&mut self) -> Option<Vec<u8>> {
        if let Some(local) = &mut self.local {
            return local.ulpdu();
        }
        let mut length = [0; FPDU_HEADER_LEN];
        match self.stream.read(&mut length[..1]) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return None,
            Err(e) => panic!("no answer in time: {e}"),
        }
        let rest = &mut length[1..];
        self.stream.read_exact(rest).expect("a whole length field");
        let len = usize::from(u16::from_be_bytes(length));
        let mut frame = length.to_vec();
        frame.resize(fpdu_len(len), 0);
        let rest = &mut frame[FPDU_HEADER_LEN..];
        self.stream.read_exact(rest).expect("a whole FPDU");
        let (covered, trailer) = frame.split_at(frame.len() - CRC_LEN);
        let want = if self.crc { crc32c(covered) } else { 0 };
        assert_eq!(want.to_le_bytes(), trailer, "CRC of what weft sent");
        Some(covered[FPDU_HEADER_LEN..FPDU_HEADER_LEN + len].to_vec())
    }

    /// The next segment: its header and payload. Empty Writes are skipped: an initiator sends them to report that it is ready, and repeats them while it
    /// receives nothing.
    pub fn segment(&mut self) -> Option<(Header, Vec<u8>)> {
        loop {
            let ulpdu = self.ulpdu()?;
            let header = Header::parse(&ulpdu).expect("weft's headers are good");
            let payload = &ulpdu[header.len()..];
            if header.opcode() != Opcode::Write || !payload.is_empty() {
                return Some((header, payload.to_vec()));
            }
        }
    }

    /// Reads until a Terminate arrives; `None` if the stream ends without one.
    pub fn terminate(&mut self) -> Option<Terminate> {
        while let Some((header, payload)) = self.segment() {
            if header.opcode() == Opcode::Terminate {
                return Some(Terminate::parse(&payload).expect("a whole Terminate"));
            }
        }
        None
    }

    /// Asserts that the stream ends and nothing else follows.
    pub fn expect_end(&mut self) {
        if let Some(local) = &mut self.local {
            local.expect_end();
            return;
        }
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert!(rest.is_empty(), "{} bytes before the end", rest.len()),
            Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}"),
        }
    }

    /// Close our direction.
    pub fn finish(&mut self) {
        if let Some(local) = &self.local {
            local.finish();
        }
        // Fails only when the victim has closed first.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

pub fn fpdu(ulpdu: &[u8], crc: bool) -> Vec<u8> {
    let len = u16::try_from(ulpdu.len()).expect("a ULPDU has at most 65,535 bytes");
    let mut out = Vec::with_capacity(fpdu_len(ulpdu.len()));
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(ulpdu);
    out.resize(fpdu_len(ulpdu.len()) - CRC_LEN, 0);
    let sum = if crc { crc32c(&out) } else { 0 };
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

/// A segment's bytes.
pub fn segment(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut hdr = [0; MAX_LEN];
    let n = header.emit(&mut hdr);
    [&hdr[..n], payload].concat()
}

/// A whole RDMA Write of one segment.
pub fn write(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(Opcode::Write, true, stag, to, payload)
}

pub fn tagged(opcode: Opcode, last: bool, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let header = Tagged {
        opcode,
        last,
        stag,
        to,
    };
    segment(&Header::Tagged(header), payload)
}

/// An untagged segment on the queue of its opcode.
pub fn untagged(opcode: Opcode, last: bool, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let header = Untagged {
        opcode,
        last,
        invalidate: 0,
        qn: opcode.queue().expect("an untagged opcode"),
        msn,
        mo,
    };
    segment(&Header::Untagged(header), payload)
}

/// A whole Send of one segment.
pub fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged(Opcode::Send, true, msn, 0, payload)
}

/// A Send with Invalidate of one segment.
pub fn send_invalidate(msn: u32, stag: u32, payload: &[u8]) -> Vec<u8> {
    let header = Untagged {
        opcode: Opcode::SendInvalidate,
        last: true,
        invalidate: stag,
        qn: 0,
        msn,
        mo: 0,
    };
    segment(&Header::Untagged(header), payload)
}

pub fn read_request(msn: u32, request: &ReadRequest) -> Vec<u8> {
    let mut body = [0; ReadRequest::LEN];
    request.emit(&mut body);
    untagged(Opcode::ReadRequest, true, msn, 0, &body)
}

pub fn atomic_request(msn: u32, request: &AtomicRequest) -> Vec<u8> {
    let mut body = [0; AtomicRequest::LEN];
    request.emit(&mut body);
    untagged(Opcode::AtomicRequest, true, msn, 0, &body)
}

pub fn atomic_response(msn: u32, response: &AtomicResponse) -> Vec<u8> {
    let mut body = [0; AtomicResponse::LEN];
    response.emit(&mut body);
    untagged(Opcode::AtomicResponse, true, msn, 0, &body)
}
